"""Depth token by token, as a picture and as HTML, and by kind of token and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from tah2.study.report.style import DEPTHS, INK, MUTED, colour, new_figure

COLUMNS = 92
"""Characters of a line in the picture"""


def shade(depth: int, ceiling: int) -> str:
    """The colour of one depth: the lightest is 1, the darkest the ceiling."""
    if ceiling <= 1:
        return DEPTHS[0]
    return DEPTHS[round((depth - 1) * (len(DEPTHS) - 2) / (ceiling - 1)) if ceiling > 2 else (depth - 1) * 3]


def is_deep(depth: int, ceiling: int) -> bool:
    """Does light ink read better on this shade?"""
    return DEPTHS.index(shade(depth, ceiling)) >= 4


def depth_html(found: Mapping[str, Any], ceiling: int) -> str:
    """One response, every token on the shade of its depth; depths are also said in titles."""
    spans = []
    for word, depth in zip(found["words"], found["depths"], strict=True):
        text = escape(printable(word))
        deep = ' class="deep"' if is_deep(depth, ceiling) else ""
        spans.append(f'<span{deep} style="background:{shade(depth, ceiling)}" title="depth {depth}">{text}</span>')
    prompt = f'<span class="prompt">{escape(found["prompt"])} </span>' if found.get("prompt") else ""
    return f'<div class="depths">{prompt}{"".join(spans)}</div>'


def key_html(ceiling: int) -> str:
    """What the shades mean."""
    marks = "".join(
        f'<span><i style="background:{shade(depth, ceiling)}"></i>{depth} iteration{"s" if depth > 1 else ""}</span>'
        for depth in range(1, ceiling + 1)
    )
    return f'<p class="key">{marks}</p>'


def printable(word: str) -> str:
    return word.replace("\t", "  ") if word.strip() or "\n" in word else "␣" * len(word)


def draw_depth_maps(maps: Sequence[Mapping[str, Any]], ceiling: int, width: float = 8.6) -> Any:
    """Responses as monospaced text on shaded tiles, a legend of shades below."""
    from matplotlib.patches import Patch, Rectangle

    laid = [(found, _lines(found)) for found in maps]
    total = sum(1.6 + max((row for row, *_ in tiles), default=0) + 1 for _, tiles in laid)
    figure, axis = new_figure(width, 0.5 + 0.2 * total)
    axis.set_axis_off()
    axis.set_xlim(0, COLUMNS)
    axis.set_ylim(total, 0)
    top = 0.0
    for found, tiles in laid:
        words = f"{found['title']}: mean depth {found['mean']:.2f}"
        axis.text(0, top + 0.5, words, fontsize=8.5, fontweight="bold", va="center", color=INK)
        for row, column, text, depth in tiles:
            y = top + 1.1 + row
            fill = shade(depth, ceiling)
            axis.add_patch(Rectangle((column + 0.06, y + 0.06), len(text) - 0.12, 0.88, facecolor=fill, linewidth=0))
            ink = "#ffffff" if is_deep(depth, ceiling) else "#10151b"
            axis.text(
                column + len(text) / 2, y + 0.52, text, fontsize=7.8, family="monospace", ha="center", va="center",
                color=ink,
            )  # fmt: skip
        top += 1.6 + max((row for row, *_ in tiles), default=0) + 1
    handles = [
        Patch(facecolor=shade(depth, ceiling), edgecolor=MUTED, linewidth=0.5, label=f"depth {depth}")
        for depth in range(1, ceiling + 1)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, ceiling))
    return figure


def _lines(found: Mapping[str, Any]) -> list[tuple[int, int, str, int]]:
    """(row, column, text, depth) of every token; words break where a line is full."""
    tiles, row, column = [], 0, 0
    for word, depth in zip(found["words"], found["depths"], strict=True):
        text = word.replace("\n", "⏎").replace("$", r"\$")
        shown = word.replace("\n", "⏎")
        if column + len(shown) > COLUMNS and column:
            row, column = row + 1, 0
        tiles.append((row, column, text[:COLUMNS], depth))
        column += len(shown)
        if "\n" in word:
            row, column = row + 1, 0
    return tiles


def draw_by_class(by_class: Mapping[str, Mapping[str, Any]], ceiling: int, width: float = 8.6) -> Any:
    """How many iterations each kind of token takes: stacked shares, mean depth beside them."""
    names = [name for name, found in by_class.items() if found["tokens"]][:20]
    figure, axis = new_figure(width, 1.1 + 0.3 * len(names))
    place = np.arange(len(names))[::-1]
    left = np.zeros(len(names))
    for depth in range(1, ceiling + 1):
        share = np.array([100 * by_class[name]["shares"][depth - 1] for name in names])
        fill = shade(depth, ceiling)
        axis.barh(place, share, left=left, height=0.72, color=fill, edgecolor=colour("grid"), linewidth=0.4,
                  label=f"depth {depth}", zorder=3)  # fmt: skip
        left += share
    for y, name in zip(place, names, strict=True):
        axis.text(101, y, f"{by_class[name]['mean']:.2f}", va="center", fontsize=8.5, color=INK)
    axis.text(101, len(names) - 0.35, "mean", va="bottom", fontsize=8, color=MUTED)
    axis.set_yticks(place, names)
    axis.set_xlim(0, 100)
    axis.set_xlabel("tokens (%)")
    axis.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=min(8, ceiling))
    return figure
