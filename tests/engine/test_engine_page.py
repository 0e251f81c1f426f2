"""Every piece of code on the page about the engine, and in the README's section on it, runs as printed."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tah2
from tah2.engine.config import EngineConfig
from tah2.engine.params import SamplingParams
from tests.engine.test_llm import folder

__all__ = ["folder"]
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```\{code-block\} python\n:caption: (\S+)\n\n(.*?)```", PAGE, re.DOTALL))
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `path/to/looped` is a checkpoint."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "looped").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(blocks: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/engine.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(home: Path, capsys: pytest.CaptureFixture[str]):
    names = run(BLOCKS)
    printed = capsys.readouterr().out
    assert names["same"] is True
    assert names["eager"].engine.stats.steps < names["plain"].engine.stats.steps
    assert names["second"].metrics.num_cached_tokens == len("A long introduction. ")
    assert re.search(r"\{'ok': (True|False)\}", printed)
    assert not names["engine"].has_unfinished_requests()
    names["engine"].check()


@pytest.mark.slow
def test_the_program_for_several_processes_prints_what_one_process_does(home: Path):
    (name, text), (command,) = FILES.popitem(), COMMANDS
    (home / name).write_text(text, encoding="utf-8")
    torchrun, *arguments = shlex.split(command)
    assert torchrun == "torchrun"
    assert arguments[-1] == name
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    alone = tah2.LLM("path/to/looped", device="cpu", kernels="off")
    (output,) = alone.generate("Loops are", SamplingParams(temperature=0.0, max_tokens=8))
    assert done.stdout == output.outputs[0].text + "\n"


@pytest.mark.slow
def test_the_readmes_section_runs(home: Path, capsys: pytest.CaptureFixture[str]):
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Engine\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    run(blocks)
    assert capsys.readouterr().out


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_every_option_is_on_the_page(config: type):
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert {field.name for field in dataclasses.fields(config)} <= named
