"""`tah2 analyze` on checkpoints of every kind, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tah2.cli.frame import main
from tah2.config.loop import LoopConfig
from tah2.config.strict import plain
from tah2.data.pocket import PocketWorld
from tah2.data.pocket.tokenizer import make_tokenizer
from tah2.data.store import save_store
from tah2.model.hf import LoopedForCausalLM
from tah2.model.hf_config import LoopedConfig
from tah2.study.analyses.inputs import open_checkpoint

WORLD = PocketWorld()
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": WORLD.vocab_size,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
WIDTHS = {"updater_width": 8, "decider_width": 8, "decider_top_k": 4}


def checkpoint(folder: Path, tokenizer: bool = True, **loop: Any) -> str:
    torch.manual_seed(0)
    model = LoopedForCausalLM(LoopedConfig(backbone=SHAPE, loop=plain(LoopConfig(**loop))))
    model.model.reset()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if tokenizer:
        speaker = make_tokenizer(WORLD.vocabulary)
        speaker.chat_template = "{% for m in messages %}{{ m.content }} {{ eos_token }} {% endfor %}"
        speaker.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tah2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("tah2"), kind="tah2", max_depth=3, **WIDTHS)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["analyze", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["analyze", *words]) == 2
    return capsys.readouterr().err


def test_gains_of_a_task_by_name_and_of_a_token_store_agree(tah2: str, tmp_path: Path, capsys):
    by_name = asked(capsys, "gains", tah2, "--data", "pocket", "--samples", "10")
    save_store(WORLD.generate(10, 0, "validation"), tmp_path / "store.npz")
    stored = asked(capsys, "gains", tah2, "--data", str(tmp_path / "store.npz"))
    assert by_name["worse"] + by_name["little"] + by_name["better"] == pytest.approx(1)
    assert by_name["counts"] == stored["counts"]
    assert by_name["documents"] == 10
    assert {"filler", "hop 1"} <= set(by_name["by_tag"])


def test_a_recipes_validation_set_is_data_too(tah2: str, tmp_path: Path, capsys):
    (tmp_path / "base.yaml").write_text("procedural: {task: pocket}\n")
    (tmp_path / "recipe.yaml").write_text("extends: base.yaml\n")
    recipe = asked(capsys, "alignment", tah2, "--data", str(tmp_path / "recipe.yaml"), "--samples", "10")
    by_name = asked(capsys, "alignment", tah2, "--data", "pocket", "--samples", "10")
    assert recipe["depths"] == by_name["depths"]
    assert sum(band["tokens"] for band in recipe["depths"][0]["bands"]) == recipe["depths"][0]["tokens"]


def test_conversations_are_data(tah2: str, tmp_path: Path, capsys):
    words = WORLD.vocabulary.words
    rows = [
        {"messages": [{"role": "user", "content": " ".join(words[9:12])}, {"role": "assistant", "content": answer}]}
        for answer in (" ".join(words[20:30]), " ".join(words[40:44]))
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = asked(capsys, "depths", tah2, "--data", str(path))
    assert found["documents"] == 2
    said = "".join(found["maps"][0]["words"]).split()
    assert set(words[21:30]) <= set(said) <= {*words[20:30], "<eos>"}
    assert sum(kind["tokens"] for kind in found["by_class"].values()) == found["tokens"]


def test_files_are_written(tah2: str, tmp_path: Path, capsys):
    for name, files in {
        "depths": {"depths.json", "depths.csv", "depths.html", "depths.png", "depth-maps.pdf"},
        "attention": {"attention.json", "attention.csv", "attention.html", "attention-maps.npz", "attention-mass.svg"},
    }.items():
        out = tmp_path / name
        words = ["--data", "pocket", "--samples", "4", "--out", str(out)]
        assert main(["analyze", name, tah2, *words]) == 0
        assert files <= {path.name for path in out.iterdir()}
        assert "written to" in capsys.readouterr().out
    with np.load(tmp_path / "attention" / "attention-maps.npz") as arrays:
        assert arrays["maps"].shape == (3, 3, 128, 128)


@pytest.mark.parametrize("kind", ["ouro", "huginn", "tah2-fixed", "ouro-adaptive"])
def test_gains_of_every_kind(kind: str, tmp_path: Path, capsys):
    options = {"updater_width": 8} if kind == "tah2-fixed" else {}
    options |= {"prelude_layers": 0, "coda_layers": 1} if kind == "huginn" else {}
    model = checkpoint(tmp_path, kind=kind, max_depth=2, **options)
    assert asked(capsys, "gains", model, "--data", "pocket", "--samples", "5")["final"] == 2


def test_a_checkpoint_in_bf16_is_measured_in_fp32(tmp_path: Path, capsys):
    model = checkpoint(tmp_path / "model", kind="ouro", max_depth=2)
    half = LoopedForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    half.float().save_pretrained(tmp_path / "whole")
    assert open_checkpoint(tmp_path / "half").model.head_weight.dtype == torch.float32
    rounded, exact = (
        asked(capsys, "gains", str(tmp_path / name), "--data", "pocket", "--samples", "5") for name in ("half", "whole")
    )
    assert rounded["mean"] == exact["mean"]


def test_what_cannot_be_analysed_is_said_in_a_sentence(tah2: str, tmp_path: Path, capsys):
    standard = checkpoint(tmp_path / "standard", kind="standard")
    assert "one iteration per token" in refused(capsys, "gains", standard, "--data", "pocket")
    assert "no decider" in refused(capsys, "alignment", standard, "--data", "pocket")
    ouro = checkpoint(tmp_path / "ouro", tokenizer=False, kind="ouro", max_depth=2)
    assert "its own iteration" in refused(capsys, "attention", ouro, "--data", "pocket", "--samples", "5")
    (tmp_path / "chat.jsonl").write_text("{}\n")
    assert "no tokenizer" in refused(capsys, "gains", ouro, "--data", str(tmp_path / "chat.jsonl"))
    plain_folder = tmp_path / "plain"
    plain_folder.mkdir()
    (plain_folder / "config.json").write_text('{"model_type": "llama"}')
    assert "tah2 convert" in refused(capsys, "gains", str(plain_folder), "--data", "pocket")
    assert "no checkpoint at" in refused(capsys, "gains", str(tmp_path / "nowhere"), "--data", "pocket")
    assert "at least 1" in refused(capsys, "gains", tah2, "--data", "pocket", "--samples", "0")
