"""Converting a pretrained model: what is kept, what is added, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tah2
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, read_mapping
from tah2.model.checkpoint import looped_model, run_conversion
from tah2.model.kinds import LOOP_KINDS
from tah2.model.source import open_source
from tah2.model.start import StartConfig

QUICK = StartConfig(steps=2, batch=8)
SMALL = {"updater_width": 4, "decider_width": 4, "decider_top_k": 3}
IDS = torch.tensor([[5, 9, 4, 12, 7, 2, 8]])


def options_of(kind: str) -> dict[str, Any]:
    unused = LOOP_KINDS[kind].unused_options()
    return {name: value for name, value in SMALL.items() if name not in unused}


def convert(source: Path, out: Path, **options: Any) -> Path:
    return tah2.convert(source, out, **{"start": QUICK, **options})


@pytest.mark.parametrize("kind", LOOP_KINDS)
@torch.no_grad()
def test_every_kind_keeps_depth_one_intact(kind: str, base: Path, tmp_path: Path):
    convert(base, tmp_path / "out", loop=kind, max_depth=3, **options_of(kind))
    model, reference = tah2.load(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(base).eval()
    out = model(IDS, max_depth=1)
    torch.testing.assert_close(out.logits, reference(IDS).logits, rtol=1e-4, atol=1e-4)
    assert out.depths.tolist() == [[1] * IDS.shape[1]]
    assert model(IDS).depths.max() == (1 if kind == "standard" or kind == "ouro-adaptive" else 3)
    assert model.config.loop["kind"] == kind


@torch.no_grad()
def test_an_untied_sharded_bf16_source_keeps_its_dtype(untied: Path, tmp_path: Path):
    convert(untied, tmp_path / "out", **SMALL)
    model = tah2.load(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    reference = AutoModelForCausalLM.from_pretrained(untied).eval()
    torch.testing.assert_close(model(IDS, max_depth=1).logits, reference(IDS).logits.float(), rtol=2e-2, atol=2e-2)
    convert(untied, tmp_path / "wide", dtype="float32", **SMALL)
    assert tah2.load(tmp_path / "wide").dtype == torch.float32
    with pytest.raises(ConfigError, match="dtype must be one of float32"):
        convert(untied, tmp_path / "no", dtype="int8")


def test_tensors_whose_dtype_fits_are_not_copied(untied: Path):
    source = open_source(untied)
    model = looped_model(source, LoopConfig("tah2", 2))
    ours = model.model.layers[0].mlp.up_proj.weight
    assert ours.data_ptr() == source.weights["model.layers.0.mlp.up_proj.weight"].data_ptr()
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())
    assert model.model.gate.score.weight.count_nonzero() == 0


def test_tokenizer_chat_template_and_generation_config_are_kept(base: Path, tmp_path: Path):
    convert(base, tmp_path / "out", **SMALL)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "out"), tah2.load(tmp_path / "out")
    message = [{"role": "question", "content": "what is the sea"}]
    before = AutoTokenizer.from_pretrained(base)
    assert tokenizer.apply_chat_template(message, tokenize=False) == before.apply_chat_template(message, tokenize=False)
    assert tokenizer("the river runs").input_ids == before("the river runs").input_ids
    assert model.generation_config.eos_token_id == [2, 3]
    assert model.generation_config.temperature == 0.7


def test_a_tokenizer_that_names_no_class_is_given_one(base: Path, tmp_path: Path):
    source = shutil.copytree(base, tmp_path / "source")
    config = read_mapping(source / "tokenizer_config.json")
    del config["tokenizer_class"]
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", **SMALL)
    assert read_mapping(tmp_path / "out" / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    (source / "tokenizer_config.json").unlink()
    convert(source, tmp_path / "out", **SMALL)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the river").input_ids == [4, 6]


def test_the_same_seed_gives_the_same_checkpoint(base: Path, tmp_path: Path):
    made = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        torch.rand(3)  # the state of the global generator does not matter, and is left alone
        state = torch.get_rng_state()
        convert(base, tmp_path / name, start=StartConfig(steps=2, batch=8, seed=seed), **SMALL)
        assert torch.equal(torch.get_rng_state(), state)
        made.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    assert not torch.equal(made[0]["model.reentry.fuse.weight"], made[2]["model.reentry.fuse.weight"])


def test_a_looped_source_keeps_its_trained_parts(base: Path, tmp_path: Path):
    """More depth for a trained model: its updater and decider go over as they are, their widths with them."""
    convert(base, tmp_path / "two", max_depth=2, exit_threshold=0.4, **SMALL)
    deeper = run_conversion(tmp_path / "two", tmp_path / "eight", {"kind": "tah2", "max_depth": 8}, QUICK)
    assert deeper.kept == ("reentry", "gate")
    assert deeper.unexplained is None
    assert (deeper.loop.max_depth, deeper.loop.updater_width, deeper.loop.exit_threshold) == (8, 4, 0.4)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "eight"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_looped_source_of_another_kind_keeps_what_fits(base: Path, tmp_path: Path):
    convert(base, tmp_path / "tah2", **SMALL)
    fixed = run_conversion(tmp_path / "tah2", tmp_path / "fixed", {"kind": "tah2-fixed", "max_depth": 2}, QUICK)
    assert fixed.kept == ("reentry",)
    ouro = run_conversion(tmp_path / "tah2", tmp_path / "ouro", {"kind": "ouro-adaptive", "max_depth": 2}, QUICK)
    assert ouro.kept == ()
    wider = run_conversion(
        tmp_path / "tah2", tmp_path / "wider", {"kind": "tah2", "max_depth": 2, "updater_width": 6}, QUICK
    )
    assert wider.kept == ("gate",)
    assert wider.unexplained is not None
    assert tah2.load(tmp_path / "wider").model.reentry.mlp.up_proj.out_features == 6


def test_a_source_without_a_tokenizer_is_fitted_on_random_tokens(untied: Path, tmp_path: Path):
    made = run_conversion(untied, tmp_path / "out", {"kind": "tah2-fixed", "max_depth": 2}, QUICK)
    assert made.unexplained is not None
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loop": "tah"}, "did you mean 'tah2'"),
        ({"max_depht": 3}, "Unknown key 'max_depht'; did you mean 'max_depth'"),
        ({"max_depth": 0}, "max_depth must be at least 1"),
        ({"loop": "ouro", "updater_width": 4}, "'ouro' has no use for updater_width"),
        ({"loop": "ouro", "exit_threshold": 0.4}, "no use for exit_threshold"),
        ({"loop": "huginn", "prelude_layers": 3, "coda_layers": 3}, "leave nothing to loop"),
    ],
)
def test_mistaken_options_are_refused_before_anything_is_written(
    options: dict[str, Any], sentence: str, base: Path, tmp_path: Path
):
    with pytest.raises(ConfigError, match=sentence):
        convert(base, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def spoiled(base: Path, tmp_path: Path, change) -> Path:
    folder = shutil.copytree(base, tmp_path / "spoiled")
    tensors = load_file(folder / "model.safetensors")
    change(folder, tensors)
    if (folder / "model.safetensors").exists():
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder, tensors: tensors.pop(NAME), f"missing tensors: {NAME}"),
        (lambda folder, tensors: tensors.update(extra=torch.zeros(1)), "unexpected tensors: extra"),
        (lambda folder, tensors: tensors.update({NAME: torch.zeros(2, 2)}), "has shape .2, 2., the config asks for"),
        (lambda folder, tensors: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder, tensors: (folder / "config.json").write_text("{"), "is not valid json"),
        (lambda folder, tensors: (folder / "model.safetensors").unlink(), "holds no .*safetensors"),
    ],
)
def test_sources_that_do_not_fit_are_refused_by_name(change, sentence: str, base: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=sentence):
        convert(spoiled(base, tmp_path, change), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_pickled_weights_are_refused(base: Path, tmp_path: Path):
    folder = shutil.copytree(base, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pickled weights \(pytorch_model.bin\), which can run code"):
        convert(folder, tmp_path / "out")


def test_a_truncated_download_is_refused(untied: Path, tmp_path: Path):
    folder = shutil.copytree(untied, tmp_path / "cut")
    shard = sorted(folder.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        convert(folder, tmp_path / "out")
    shard.unlink()
    with pytest.raises(ConfigError, match=r"is incomplete: .* is listed"):
        convert(folder, tmp_path / "out")


def test_a_hub_id_is_downloaded_without_pickles(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(base)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    convert("owner/model", tmp_path / "out", **SMALL)
    assert asked["name"] == "owner/model"
    assert not any(pattern.endswith(("bin", "pt", "py")) for pattern in asked["patterns"])
    assert tah2.load(tmp_path / "out").config.loop["kind"] == "tah2"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConnectionError("no route"), r"hub could not be reached \(ConnectionError\)"),
        (HFValidationError("bad name"), "neither a local folder nor a model on the hub"),
    ],
)
def test_a_hub_that_cannot_help_is_one_sentence(
    error: Exception, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ConfigError, match=sentence):
        convert("owner/model", tmp_path / "out")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="neither a checkpoint folder nor a"):
        convert(tmp_path / "notes.txt", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"missing.gguf does not exist"):
        convert(tmp_path / "missing.gguf", tmp_path / "out")
