"""What a page is made of: sections of paragraphs, figures, tables and notes about what is missing."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its words, and what sets it apart."""

    text: str
    small: str = ""
    """An addition in small print: an interval, a gain"""
    strong: bool = False
    colour: str = ""
    """A name of the palette, for a swatch before the text"""


@dataclass(frozen=True)
class Row:
    head: Cell
    cells: tuple[Cell, ...]
    marked: bool = False
    rule: bool = False
    """A line above sets a group of rows apart"""


class Block(Protocol):
    def html(self) -> str: ...


@dataclass(frozen=True)
class Paragraph:
    text: str

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Missing:
    """Something the study has not (yet) got."""

    text: str

    def html(self) -> str:
        return f'<p class="missing" role="note">{escape(self.text)}</p>'


@dataclass(frozen=True)
class Raw:
    """HTML that is made and escaped elsewhere."""

    markup: str
    table: Table | None = None
    """A table inside it, to be written as CSV too"""

    def html(self) -> str:
        return self.markup


@dataclass(frozen=True)
class Table:
    name: str
    """Of its CSV file and its anchor"""
    caption: str
    columns: tuple[str, ...]
    """The heads; the first is that of the row heads"""
    rows: tuple[Row, ...]
    notes: str = ""
    worded: bool = False
    """Its cells are words, not numbers"""

    def html(self) -> str:
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        body = "".join(_row(row) for row in self.rows)
        worded = ' class="words"' if self.worded else ""
        notes = f'<p class="notes">{escape(self.notes)}</p>' if self.notes else ""
        return (
            f'<div class="table" id="{self.name}"><div class="wide" tabindex="0" role="region" '
            f'aria-label="{escape(self.caption.split(".")[0], quote=True)}"><table{worded}>'
            f"<caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
            f"{notes}</div>"
        )

    def write_csv(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            for row in self.rows:
                writer.writerow([_plain(cell) for cell in (row.head, *row.cells)])
        return path


def _plain(cell: Cell) -> str:
    return f"{cell.text} {cell.small}".strip()


def _row(row: Row) -> str:
    classes = " ".join(name for name, there in (("marked", row.marked), ("rule", row.rule)) if there)
    attribute = f' class="{classes}"' if classes else ""
    cells = "".join(f"<td>{_cell(cell)}</td>" for cell in row.cells)
    return f'<tr{attribute}><th scope="row">{_cell(row.head)}</th>{cells}</tr>'


def _cell(cell: Cell) -> str:
    text = f"<strong>{escape(cell.text)}</strong>" if cell.strong else escape(cell.text)
    swatch = f'<span class="swatch" style="background:var(--f-{cell.colour})"></span>' if cell.colour else ""
    small = f" <small>{escape(cell.small)}</small>" if cell.small else ""
    return swatch + text + small


@dataclass(frozen=True)
class Figure:
    """A picture with what it shows in words, and the numbers behind it."""

    name: str
    """Of its files and its anchor"""
    title: str
    caption: str
    alt: str
    drawing: Any
    """A matplotlib figure"""
    paper: str = ""
    """What the paper published for it"""
    numbers: Table | None = None

    def html(self) -> str:
        from tah2.study.report.svg import inline_svg

        picture = inline_svg(self.drawing, self.name, self.title, self.alt)
        paper = f'<p class="paper"><b>In the paper.</b> {escape(self.paper)}</p>' if self.paper else ""
        numbers = ""
        if self.numbers is not None:
            numbers = f"<details><summary>The numbers</summary>{self.numbers.html()}</details>"
        return (
            f'<figure id="{self.name}"><div class="picture">{picture}</div>'
            f"<figcaption><p><b>{escape(self.title)}.</b> {escape(self.caption)}</p>{paper}</figcaption>"
            f"{numbers}</figure>"
        )


@dataclass(frozen=True)
class Section:
    name: str
    """Its anchor"""
    title: str
    blocks: tuple[Block, ...]
    absent: bool = False
    """The study does not ask for what it would show"""

    def html(self) -> str:
        body = "".join(block.html() for block in self.blocks)
        return f'<section id="{self.name}"><h2>{escape(self.title)}</h2>{body}</section>'
