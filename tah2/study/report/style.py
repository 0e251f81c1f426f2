"""How every figure looks: one palette for paper and screen, light and dark.

Colours are named. A figure is drawn with their light values; in the page, SVG refers to them as CSS variables
(`stylesheet`), so that one drawing serves light and dark. No two names share a light value.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

INK, MUTED, GRID, FAINT, PAPER = "#1d2126", "#5c6670", "#dfe3e8", "#eef0f3", "#fffffe"
PALETTE: dict[str, tuple[str, str]] = {
    "ink": (INK, "#e8eaed"),
    "muted": (MUTED, "#9aa4af"),
    "grid": (GRID, "#343a42"),
    "faint": (FAINT, "#262b31"),
    "paper": (PAPER, "#16191d"),
    "standard": ("#59636e", "#b4bec9"),
    "huginn": ("#b07d00", "#e3b341"),
    "ouro": ("#1f7a5c", "#4fc295"),
    "ouro-adaptive": ("#2a9db8", "#67cbe3"),
    "fixed": ("#7457c4", "#b197f0"),
    "fixed-deep": ("#4a2f9c", "#d0bdfb"),
    "tah2": ("#e0566b", "#ff9aa8"),
    "tah2-deep": ("#c01f45", "#ff6f88"),
    "tah2-deepest": ("#7d0f35", "#ff4468"),
    "other": ("#8a6d5c", "#c9ab99"),
    "worse": ("#c9503b", "#f08a76"),
    "little": ("#a8b0b9", "#6b7580"),
    "better": ("#2f7fc1", "#74b6ec"),
}
"""name -> (light, dark)"""

DEPTHS = ("#f1f3f6", "#cfe3f5", "#9dc7ea", "#66a6db", "#3a84c5", "#2264a6", "#174a82", "#0f345f")
"""Shades of iterations 1, 2, ... 8 in maps of depth; deeper is darker in light and in dark."""


@dataclass(frozen=True)
class Look:
    """How one variant is drawn wherever it appears."""

    colour: str
    marker: str = "o"
    line: Any = "-"
    order: int = 2


def colour(name: str) -> str:
    return PALETTE[name][0]


def look_of(loop: str, max_depth: int, rank: int = 0) -> Look:
    """The look of a loop kind at ceiling M; `rank` tells variants of one kind and M apart."""
    dashes: Sequence[Any] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
    line = dashes[rank % len(dashes)]
    if loop == "standard":
        return Look(colour("standard"), "o", line, 3)
    if loop == "huginn":
        return Look(colour("huginn"), "^" if max_depth <= 3 else "v", line)
    if loop == "ouro":
        return Look(colour("ouro"), "s" if max_depth <= 2 else "D", line)
    if loop == "ouro-adaptive":
        return Look(colour("ouro-adaptive"), "P", line)
    if loop == "tah2-fixed":
        return Look(colour("fixed" if max_depth <= 2 else "fixed-deep"), "X" if max_depth <= 2 else "p", line)
    if loop == "tah2":
        shade = "tah2" if max_depth <= 2 else "tah2-deep" if max_depth <= 4 else "tah2-deepest"
        return Look(colour(shade), {2: "o", 4: "D"}.get(max_depth, "*"), line, 4)
    return Look(colour("other"), "h", line)


RC: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7.0,
    "axes.labelsize": 9.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "lines.markeredgewidth": 0.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "tah2",
    "pdf.fonttype": 3,
}


def styled() -> AbstractContextManager[None]:
    """Everything drawn and saved inside looks like this project."""
    import matplotlib

    return matplotlib.rc_context(RC)


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches and its axes: one, or an array `[rows, columns]`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes[0, 0] if rows == columns == 1 else axes


def legend_below(figure: Any, handles: Sequence[Any], columns: int = 4) -> None:
    """One legend for the whole figure, outside of all axes."""
    figure.legend(handles=list(handles), loc="outside lower center", ncols=max(1, min(columns, len(handles))))


def stylesheet() -> str:
    """The palette as CSS: light by default and in print, dark where the reader prefers it."""
    light, dark = ("".join(f"--f-{name}:{pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
