"""Curves: accuracy and loss against compute, depth, time and votes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tah2.study.report.style import MUTED, Look, colour, legend_below, new_figure


@dataclass(frozen=True)
class Series:
    """One curve: its points, and a band or bars around them."""

    label: str
    look: Look
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    fit: tuple[float, float] | None = None
    """(slope, intercept) of a line on log2 x"""

    @property
    def points(self) -> tuple[list[float], list[float]]:
        return np.asarray(self.x, float).tolist(), np.asarray(self.y, float).tolist()


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[Series]
    xlabel: str = ""
    ylabel: str = ""
    log2: bool = False
    """x on a log2 axis with readable ticks"""
    xticks: Sequence[float] | None = None
    unit: float = 1.0
    """What x is divided by for its ticks"""
    level: tuple[float, Look, str] | None = None
    """A horizontal line: (y, look, label)"""
    bars: bool = False
    """Draw intervals as bars instead of bands"""
    below: float | None = None
    """The lowest value that y may take"""


def panels(content: Sequence[Panel], columns: int, width: float, height: float, share_y: bool = False) -> Any:
    """A grid of panels with one legend below."""
    rows = -(-len(content) // columns)
    figure, grid = new_figure(width, height, rows, columns, sharey=share_y)
    axes = np.atleast_1d(np.asarray(grid)).ravel()
    labelled: dict[str, Any] = {}
    for axis, panel in zip(axes, content, strict=False):
        _draw(axis, panel, labelled)
    for axis in axes[len(content) :]:
        axis.set_axis_off()
    if share_y:
        for number, axis in enumerate(axes[: len(content)]):
            if number % columns:
                axis.set_ylabel("")
    if labelled:
        legend_below(figure, list(labelled.values()), columns=max(2, int(width // 1.75)))
    return figure


def _draw(axis: Any, panel: Panel, labelled: dict[str, Any]) -> None:
    if panel.level is not None:
        height, look, label = panel.level
        handle = axis.axhline(height, color=look.colour, linewidth=1.3, linestyle=(0, (4, 2)), label=label, zorder=1)
        labelled.setdefault(label, handle)
    for series in panel.series:
        _draw_series(axis, panel, series, labelled)
    axis.set_title(panel.title)
    axis.set_xlabel(panel.xlabel)
    axis.set_ylabel(panel.ylabel)
    if panel.log2:
        _log2_axis(axis, panel)
    if panel.xticks is not None:
        axis.set_xticks(list(panel.xticks))
    if panel.below is not None:
        axis.set_ylim(bottom=panel.below)


def _draw_series(axis: Any, panel: Panel, series: Series, labelled: dict[str, Any]) -> None:
    x, y, look = np.asarray(series.x, float), np.asarray(series.y, float), series.look
    style = {"color": look.colour, "marker": look.marker, "label": series.label, "zorder": look.order + 1}
    if series.fit is not None:
        (handle,) = axis.plot(x, y, linestyle="none", **style)
        slope, intercept = series.fit
        ends = np.array([x.min(), x.max()])
        axis.plot(ends, intercept + slope * np.log2(ends), color=look.colour, linestyle=look.line, linewidth=1.4)
    else:
        (handle,) = axis.plot(x, y, linestyle=look.line, **style)
    labelled.setdefault(series.label, handle)
    if series.low is None or series.high is None:
        return
    low, high = np.asarray(series.low, float), np.asarray(series.high, float)
    if panel.bars:
        axis.vlines(x, low, high, color=look.colour, linewidth=1.1, alpha=0.75, zorder=look.order)
    else:
        axis.fill_between(x, low, high, color=look.colour, alpha=0.12, linewidth=0, zorder=1)


def _log2_axis(axis: Any, panel: Panel) -> None:
    """Ticks at doublings (or halves of them), written plainly in the panel's unit."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    values = [value for series in panel.series for value in np.asarray(series.x, float)]
    if not values:
        return
    axis.set_xscale("log", base=2)
    low, high = np.log2(min(values)), np.log2(max(values))
    margin = max(0.08, 0.05 * (high - low))
    axis.set_xlim(2 ** (low - margin), 2 ** (high + margin))
    ticks = doublings(2 ** (low - margin) / panel.unit, 2 ** (high + margin) / panel.unit)
    axis.xaxis.set_major_locator(FixedLocator([tick * panel.unit for tick in ticks]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticklabels([f"{tick:g}" for tick in ticks])


def doublings(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers, a doubling apart (or more, or less), that lie between `low` and `high`."""
    for step in (0.5, 1, 2, 3, 4, 6, 8):
        start = int(np.ceil(np.log2(low) / step))
        ticks = [2.0 ** (step * k) for k in range(start, int(np.floor(np.log2(high) / step)) + 1)]
        if len(ticks) <= most:
            break
    return [float(f"{tick:.2g}") if tick < 100 else round(tick) for tick in ticks]


def muted_note(axis: Any, text: str, x: float, y: float) -> None:
    axis.text(x, y, text, transform=axis.transAxes, color=MUTED, fontsize=8, ha="left", va="top")


def reference(name: str = "standard") -> Look:
    return Look(colour(name), "", (0, (4, 2)), 1)
