"""A response in the terminal, every token in the colour of its depth."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tah2.evals.records import SampleRecord
from tah2.study.layout import Results, UnitResult

STYLES = ("dim", "bold black on yellow", "bold white on dark_orange3", "bold white on red3", "bold white on purple4")
"""Of depth 1, 2, ...; the last one serves all that are deeper."""


def style_of(depth: int) -> str:
    return STYLES[min(depth, len(STYLES)) - 1]


def colour_tokens(words: Sequence[str], depths: Sequence[int]) -> Text:
    """Words between spaces, each in the style of its depth."""
    line = Text()
    for word, depth in zip(words, depths, strict=False):
        line.append(word, style=style_of(depth))
        line.append(" ")
    return line


def legend(deepest: int) -> Text:
    line = Text("depth: ")
    for depth in range(1, deepest + 1):
        line.append(f" {depth} ", style=style_of(depth))
        line.append(" ")
    return line


def telling_record(unit: UnitResult) -> SampleRecord | None:
    """A correct response in which tokens of all depths stand: the longest of those that go deepest."""
    right = {(row.task, row.problem, row.repeat) for row in unit.grades if row.correct}
    records = [record for record in unit.records() if (record.task, record.problem, record.repeat) in right]
    if not records:
        records = unit.records()
    return max(records, key=lambda r: (max(r.depths, default=0), len(set(r.depths)), len(r.depths)), default=None)


def picture(results: Results, variant: str) -> RenderableType | None:
    """One response of a variant's first unit, with the colours explained; None where there is none."""
    unit = results.of(variant)[0]
    record = telling_record(unit) if unit.grades else None
    if record is None:
        return None
    mean = sum(record.depths) / len(record.depths)
    title = Text(f"{unit.info.title} answers {record.problem}: mean depth {mean:.2f}", style="bold")
    return Group(title, colour_tokens(record.text.split(), record.depths), legend(max(record.depths)))
