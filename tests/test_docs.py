"""What the pages say is true: kinds, commands and links exist, and the pictures are those of the rules."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from tah2.cli.frame import COMMANDS
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


def test_commands_in_the_pages_exist():
    named = {
        name
        for page in PAGES
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for name in re.findall(r"^tah2 ([a-z-]+)", block, re.MULTILINE)
    }
    assert named
    assert named <= set(COMMANDS)


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("tah2_pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


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
