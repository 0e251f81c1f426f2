"""`tah2 convert` as its users meet it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tah2
from tah2.cli import main
from tah2.cli.convert import EPILOG
from tah2.config.loop import LoopConfig
from tah2.model import start
from tah2.model.kinds import LOOP_KINDS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {"vocab_size": 31, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4, eos_token_id=None)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Documents of eight tokens keep the fit short."""
    monkeypatch.setattr(start, "DOCUMENT", 8)


def test_it_makes_a_checkpoint_and_says_what_it_made(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--loop", "tah2", "--max-depth", "4", "--exit-threshold", "0.4", "--updater-width", "5"]
    words += ["--decider-width", "3", "--decider-top-k", "2", "--dtype", "bfloat16"]
    assert main(["convert", str(base), str(tmp_path / "out"), *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("loop        tah2, up to 4 passes\n")
    assert "in the updater" in said
    assert "in the decider" in said
    assert "unexplained on held-out text" in said
    assert said.endswith(f"saved to    {tmp_path / 'out'}\n")
    model = tah2.load(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.config.loop_config == LoopConfig("tah2", 4, 0.4, updater_width=5, decider_width=3, decider_top_k=2)


@pytest.mark.parametrize("kind", LOOP_KINDS)
def test_every_kind_converts(kind: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["convert", str(base), str(tmp_path / "out"), "--loop", kind, "--start", "random"]) == 0
    assert ("one pass" in capsys.readouterr().out) == (kind == "standard")
    assert tah2.load(tmp_path / "out").model.kind.name == kind


def test_a_deeper_copy_keeps_the_trained_parts(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["convert", str(base), str(tmp_path / "two")]) == 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "two"), str(tmp_path / "four"), "--max-depth", "4"]) == 0
    said = capsys.readouterr().out
    assert "kept        the source's reentry and gate" in said
    assert "unexplained" not in said


def test_a_middle_loop_takes_its_split(base: Path, tmp_path: Path):
    words = ["--loop", "huginn", "--prelude-layers", "1", "--coda-layers", "2"]
    assert main(["convert", str(base), str(tmp_path / "out"), *words]) == 0
    assert tah2.load(tmp_path / "out").model.looped == range(1, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--loop", "tah3"], "Unknown loop kind 'tah3'; did you mean 'tah2'"),
        (["--loop", "ouro", "--updater-width", "4"], "'ouro' has no use for updater_width"),
        (["--start-text", "nowhere.txt"], "no tokenizer"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], sentence: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["convert", str(base), str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tah2: ")
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_help_shows_examples_that_parse(capsys: pytest.CaptureFixture[str]):
    from tah2.cli.convert import _parser

    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    assert EPILOG in capsys.readouterr().out
    for line in EPILOG.splitlines()[1:]:
        options = _parser().parse_args(line.split()[2:])
        assert options.loop in LOOP_KINDS
