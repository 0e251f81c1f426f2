"""The page about distillation runs as printed, against a server in this process."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tah2.cli import main
from tah2.config.strict import build, merge
from tah2.distill.config import DistillConfig
from tests.evals.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT.parent / "shared" / "benchmarks"
PAGE = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, student: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    smaller = [
        f"model.path={student}",
        "budget.steps=1",
        "loop=null",
        "data.validation_samples=0",
        "validation.every=0",
    ]
    ran = []
    with FakeServer() as server:
        for command in COMMANDS:
            words = shlex.split(command)[1:]
            if words[0] == "distill":
                words.append(f"teacher.endpoint.url={server.url}")
            elif words[0] == "sft":
                words += [*smaller, "logging.loggers=[]"]
            elif not BENCHMARKS.is_dir():
                continue
            else:
                words[words.index("--data-dir") + 1] = str(BENCHMARKS)
            assert main(words) == 0, command
            ran.append(words[0])
    assert ran[:2] == ["distill", "sft"]
    assert "1  duplicate prompt" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("runs/distilled/train.jsonl").read_text().splitlines()]
    (shown,) = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    assert [row["id"] for row in rows] == ["sum", "prime"]
    assert set(shown) == set(rows[0])
    assert set(shown["provenance"]) <= set(rows[0]["provenance"])
    if BENCHMARKS.is_dir():
        assert Path("runs/clean/prompts.jsonl").read_text() == FILES["prompts.jsonl"]


def test_pieces_of_recipes_on_the_page_are_valid():
    recipe = yaml.safe_load(FILES["distill.yaml"])
    for piece in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        build(DistillConfig, merge(recipe, yaml.safe_load(piece)))
