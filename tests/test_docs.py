"""What the pages say is true: kinds, commands and links exist, and the pictures are those of the rules."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tah2
from tah2.cli.frame import COMMANDS, main
from tah2.model.kinds import LOOP_KINDS
from tah2.visibility import dense_mask

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def kind_rows(page: Path) -> dict[str, list[str]]:
    """The rows of the page's table of loop kinds: name -> cells."""
    rows = [line.strip("| ").split("|") for line in page.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    cells = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}
    return {name: row for name, row in cells.items() if len(row) == 5}


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_the_table_of_loop_kinds_is_the_table_of_the_code(page: str):
    rows = kind_rows(ROOT / page)
    assert set(rows) == set(LOOP_KINDS)
    for name, kind in LOOP_KINDS.items():
        assert kind.rule.name in rows[name]
        prediction = kind.output.value.replace("-", " ")
        assert any(cell.startswith(prediction) for cell in rows[name])
        assert ("a middle block" in rows[name]) == kind.loops_middle


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def commands_in(page: Path) -> list[str]:
    """The lines of the page's bash blocks that call `tah2`, without that word."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in re.findall(r"^tah2 (.+)$", block, re.MULTILINE)]


def test_commands_in_the_pages_exist():
    named = {line.split()[0] for page in PAGES for line in commands_in(page)}
    assert named
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("line", [line for line in commands_in(ROOT / "README.md") if "path/to" not in line])
def test_commands_of_the_readme_run(line: str, capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(line)) == 0
    assert capsys.readouterr().out


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"of_the_pages_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_shows_every_kind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from tah2.model.start import StartConfig

    monkeypatch.setattr(tah2, "convert", partial(tah2.convert, start=StartConfig(steps=1)))
    module_at(ROOT / "examples" / "tiny_loops.py").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(LOOP_KINDS)


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return module_at(ROOT / "docs" / "pictures.py")


def test_the_concepts_show_every_picture(pictures):
    shown = re.findall(r"_generated/([\w-]+)\.svg", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))
    assert shown == [picture.name for picture in pictures.PICTURES]


def test_pictured_lookaheads_are_read_by_themselves_alone(pictures):
    entries = pictures.entries_of(pictures.PICTURES[-1])
    assert entries.lookahead.sum() == 3
    mask = dense_mask(pictures.PICTURES[-1].rule, entries, entries)
    readers = mask[:, entries.lookahead]
    assert torch.equal(readers, torch.eye(len(entries), dtype=torch.bool)[:, entries.lookahead])


@pytest.mark.slow
def test_pictures_are_reproducible(pictures, tmp_path: Path):
    first, second = (pictures.draw_all(tmp_path / name) for name in ("first", "second"))
    assert len(first) == len(pictures.PICTURES)
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
