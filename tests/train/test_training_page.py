"""Every command and every piece of code on the page about training runs, in this order, on less data."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tah2.cli import main
from tah2.cli.recipe import load_recipe
from tah2.train.schemes import SCHEMES
from tests.data.conftest import tokenizer
from tests.train.runs import SHAPE

__all__ = ["tokenizer"]
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)```", PAGE, re.DOTALL))
BLOCKS: list[tuple[str, str]] = re.findall(r"```(bash|python)\n(.*?)```", PAGE, re.DOTALL)
LESS = ["budget.steps=1", "validation.every=0", "model.start.steps=2", "logging.loggers=[]"]
LESS_OF_A_TASK = ["procedural.samples=32", "procedural.validation_samples=8", "batch.samples=4"]


def run_command(line: str) -> None:
    """`tah2 ...`, or `torchrun ... -m tah2 ...` as a single process; everything else on the page fails here."""
    words = shlex.split(line)
    words = words[words.index("tah2") :]
    assert words[:2] == ["tah2", "sft"], line
    less = LESS + (LESS_OF_A_TASK if "procedural" in load_recipe(words[2]) else [])
    assert main([*words[1:], *less]) == 0, line


def run_code(text: str) -> None:
    exec(compile(text, "docs/training.md", "exec"), {"__name__": "page"})


def run_commands(block: str) -> None:
    for line in block.splitlines():
        run_command(line)


RUN: dict[str, Callable[[str], None]] = {"bash": run_commands, "python": run_code}


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shape = {name: value for name, value in SHAPE.items() if name != "model_type"}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**shape, "vocab_size": len(tokenizer)})).save_pretrained("path/to/model")
    tokenizer.save_pretrained("path/to/model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for language, block in BLOCKS:
        RUN[language](block)
    out, err = capsys.readouterr()
    assert "4 rows read from 1 source(s), 4 kept" in err
    assert "max_depth: 4" in out
    assert re.search(r"^tah2 \d+$", out, re.MULTILINE)
    assert re.search(r"^finished \d+\.\d+$", out, re.MULTILINE)
    kept = {path.name for path in (tmp_path / "runs").iterdir()}
    assert kept >= {"chase-tah2", "chase-ouro-gate", "chase-decider", "chase-lora", "chase-two", "my-recipe"}
    assert "chase-m4" not in kept, "--show only shows"


def test_the_page_names_every_scheme():
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)
    assert set(SCHEMES) <= set(rows)
