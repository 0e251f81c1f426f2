"""The Hugging Face face: auto classes, strict loading, batches, packing, caches, and readers without the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tah2
from tah2.config.strict import ConfigError
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tah2.model.hf_batch import LoopCache
from tah2.model.loop import Tokens
from tah2.model.scoring import score
from tah2.model.start import StartConfig
from tests.model.tiny import VARIANTS, random_documents, tiny_model

QUICK = StartConfig(steps=2, batch=8)


def a_model(variant: str = "tah2", **backbone: object) -> LoopedForCausalLM:
    """A model whose gate decides for itself."""
    widths = {"updater_width": 5, "decider_width": 6, "decider_top_k": 4, "max_depth": 3}
    shape = {
        "model_type": "qwen3",
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **backbone,
    }
    model = LoopedForCausalLM(LoopedConfig(backbone=shape, loop={**widths, **VARIANTS[variant]}))
    model.model = tiny_model(model.config.loop_config)
    return model.eval()


@pytest.fixture(scope="module")
def looped(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    widths = {"updater_width": 4, "decider_width": 4, "decider_top_k": 3}
    return tah2.convert(base, tmp_path_factory.mktemp("looped") / "out", max_depth=3, start=QUICK, **widths)


def test_auto_classes_load_what_was_saved(looped: Path):
    model, config = AutoModelForCausalLM.from_pretrained(looped), AutoConfig.from_pretrained(looped)
    assert type(model) is LoopedForCausalLM
    assert config.loop == model.config.loop
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (16, 4, 23)
    assert config.eos_token_id == 2
    assert not model.training


@pytest.mark.parametrize("shard", [None, "2KB"])
@pytest.mark.parametrize("variant", ["tah2", "ouro-adaptive", "huginn"])
def test_a_saved_model_is_loaded_tensor_by_tensor(variant: str, shard: str | None, tmp_path: Path):
    model = a_model(variant)
    model.save_pretrained(tmp_path, **({} if shard is None else {"max_shard_size": shard}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard is not None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.config.loop_config == model.config.loop_config


def test_a_dtype_may_be_asked_for(looped: Path):
    assert tah2.load(looped, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(looped, dtype="float16").dtype == torch.float16


def spoil(looped: Path, tmp_path: Path, change) -> Path:
    folder = shutil.copytree(looped, tmp_path / "spoiled")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NAME = "model.reentry.fuse.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(NAME), f"missing tensors: {NAME}"),
        (lambda tensors: tensors.update({"model.spare": torch.zeros(1)}), "unexpected tensors: model.spare"),
    ],
)
def test_loading_is_strict_and_names_the_tensors(change, sentence: str, looped: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=sentence):
        AutoModelForCausalLM.from_pretrained(spoil(looped, tmp_path, change))


def test_a_tensor_of_another_shape_is_refused_by_name(looped: Path, tmp_path: Path):
    folder = spoil(looped, tmp_path, lambda tensors: tensors.update({NAME: torch.zeros(2, 3)}))
    with pytest.raises(ConfigError, match=f"config; misshapen tensors: {NAME}"):
        tah2.load(folder)


def test_pickled_weights_are_never_opened(looped: Path, tmp_path: Path):
    folder = shutil.copytree(looped, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="pickled weights are refused"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_config_with_a_typing_error_is_refused(looped: Path, tmp_path: Path):
    folder = shutil.copytree(looped, tmp_path / "typo")
    config = json.loads((folder / "config.json").read_text())
    config["loop"]["max_dept"] = config["loop"].pop("max_depth")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="did you mean 'max_depth'"):
        AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str):
    model = a_model()
    documents = random_documents(7, 4)
    batch, mask = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)
    batch[0], mask[0] = documents[0], 1
    columns = slice(3, 7) if side == "left" else slice(0, 4)
    batch[1, columns], mask[1, columns] = documents[1], 1
    out = model(batch, attention_mask=mask, output_depth_logprobs=True, output_hidden_states=True)
    for row, ids, where in ((0, documents[0], slice(None)), (1, documents[1], columns)):
        alone = model(ids[None], output_depth_logprobs=True, output_hidden_states=True)
        torch.testing.assert_close(out.logits[row, where], alone.logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.hidden_states[0][row, where], alone.hidden_states[0][0], rtol=1e-4, atol=1e-5)
        assert torch.equal(out.depths[row, where], alone.depths[0])
        for name in ("continue_probs", "depth_logprobs"):
            ours, theirs = getattr(out, name)[row, where], getattr(alone, name)[0]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    padding = mask == 0
    assert not out.depths[padding].any()
    assert out.continue_probs[padding].isnan().all()


@torch.no_grad()
def test_what_a_call_reports_is_what_the_loop_did():
    model, (ids,) = a_model(), random_documents(8)
    out = model(ids[None], output_depth_logprobs=True)
    run = score(model.model, Tokens.pack([ids]), every_depth=True).run
    assert out.depths[0].tolist() == run.executed.tolist()
    assert out.continue_probs.shape == (1, 8, 2)
    assert out.depth_logprobs.shape == (1, 8, 3, 23)
    for token, depth in enumerate(out.depths[0].tolist()):
        executed = ~out.depth_logprobs[0, token].isnan().any(-1)
        assert executed.tolist() == [m <= depth for m in (1, 2, 3)]
        asked = ~out.continue_probs[0, token].isnan()
        assert asked.tolist() == [m <= depth for m in (1, 2)]
    g = out.continue_probs[0].nan_to_num()
    weights = torch.stack([1 - g[:, 0], g[:, 0] * (1 - g[:, 1]), g[:, 0] * g[:, 1]], dim=-1)
    for token, depth in enumerate(out.depths[0].tolist()):
        weights[token, depth - 1 :] = 0
        weights[token, depth - 1] = 1 - weights[token].sum()
    mixed = (weights[..., None] * out.depth_logprobs[0].nan_to_num(-1e9).exp()).sum(1)
    torch.testing.assert_close(out.logits[0].softmax(-1), mixed, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_packed_rows_are_told_apart_by_their_positions():
    model, documents = a_model(), random_documents(5, 3)
    row, positions = torch.cat(documents)[None], torch.cat([torch.arange(5), torch.arange(3)])[None]
    packed = model(row, position_ids=positions).logits[0]
    alone = torch.cat([model(ids[None]).logits[0] for ids in documents])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cannot use a cache"):
        model(row, position_ids=positions, past_key_values=LoopCache())


@torch.no_grad()
@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 5])])
def test_some_logits_may_be_kept(keep):
    model, (ids,) = a_model(), random_documents(8)
    everything, some = model(ids[None]).logits, model(ids[None], logits_to_keep=keep).logits
    rows = slice(-keep, None) if isinstance(keep, int) else keep
    torch.testing.assert_close(some, everything[:, rows])


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_continues_where_the_last_call_stopped(variant: str):
    model, (ids,) = a_model(variant), random_documents(8)
    whole = model(ids[None]).logits
    first = model(ids[None, :5], use_cache=True)
    second = model(ids[None, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=1e-4)
    assert second.past_key_values.get_seq_length() == 8


@torch.no_grad()
def test_a_call_that_may_not_use_its_cache_leaves_it_alone():
    model, (ids,) = a_model(), random_documents(6)
    cache = model(ids[None, :4], use_cache=True).past_key_values
    peeked = model(ids[None, 4:], past_key_values=cache, use_cache=False)
    assert peeked.past_key_values is None
    assert cache.get_seq_length() == 4
    again = model(ids[None, 4:], past_key_values=cache)
    torch.testing.assert_close(again.logits, peeked.logits)


def test_labels_give_a_loss_with_gradients():
    model, (ids,) = a_model(), random_documents(8)
    labels = ids.clone()
    labels[:3] = -100
    out = model(ids[None], labels=labels[None])
    logprobs = out.logits[0, 2:-1].log_softmax(-1)
    torch.testing.assert_close(out.loss, -logprobs[torch.arange(5), ids[3:]].mean())
    out.loss.backward()
    assert model.model.gate.score.weight.grad.any()
    assert model.model.reentry.fuse.weight.grad.any()


@torch.no_grad()
def test_arguments_of_other_models_are_refused_unless_they_ask_for_nothing():
    model, (ids,) = a_model(), random_documents(4)
    assert model(ids[None], output_attentions=False, inputs_embeds=None).logits.shape == (1, 4, 23)
    with pytest.raises(TypeError, match="do not take exit_treshold"):
        model(ids[None], exit_treshold=0.5)
    with pytest.raises(ValueError, match="must have two dimensions"):
        model(ids)
    with pytest.raises(ValueError, match="padding mask"):
        model(ids[None], attention_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(ConfigError, match="max_depth must be at least 1"):
        model(ids[None], max_depth=0)
    assert isinstance(model(ids[None], return_dict=False), tuple)
    with pytest.raises(ValueError, match="no per-depth predictions"):
        a_model("huginn")(ids[None], output_depth_logprobs=True)


def without_package(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run `program` where `import tah2` fails, away from the checkout, without a network."""
    (tmp_path / "block.py").write_text("import sys\nsys.modules['tah2'] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", f"import block\n{program}"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )


@pytest.mark.slow
def test_readers_without_the_package_see_what_they_need(looped: Path, tmp_path: Path):
    program = f"""
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {str(looped)!r}
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
except ImportError as error:
    print("TRUSTED", error)
try:
    AutoModelForCausalLM.from_pretrained(folder)
except ValueError as error:
    print("\\nUNTRUSTED", " ".join(str(error).split()))
for trust in ({{}}, {{"trust_remote_code": False}}):
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    print("\\nTOKENS", tokenizer("the river runs").input_ids, tokenizer.chat_template is not None)
"""
    done = without_package(program, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("TRUSTED", "UNTRUSTED", "TOKENS"))]
    assert "install the package tah2" in lines[0]
    assert "trust_remote_code=True" in lines[1]
    tokens = f"TOKENS {AutoTokenizer.from_pretrained(looped)('the river runs').input_ids} True"
    assert lines[2:] == [tokens, tokens]
