"""Token by token: what a further pass does for each, and whether the decider knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tah2.study.report.style import INK, MUTED, colour, legend_below, new_figure

WIDE = 2.0
"""Gains beyond this many nats ask for a logarithmic axis on both sides of zero"""
FEWEST = 5
"""Bands of fewer tokens are not drawn"""
REGIONS = ("worse", "little", "better")


def draw_gains(content: Sequence[tuple[str, Mapping[str, Any]]], width: float = 8.6) -> Any:
    """One histogram per model, from titles and `Gains` as JSON; bins are as wide as each other on their log scale."""
    from matplotlib.patches import Patch

    columns = min(2, len(content))
    rows = -(-len(content) // columns)
    figure, grid = new_figure(width if columns > 1 else 5.6, 0.5 + 2.75 * rows, rows, columns)
    axes = np.atleast_1d(np.asarray(grid)).ravel()
    for axis, (title, found) in zip(axes, content, strict=False):
        _histogram(axis, title, found)
    for axis in axes[len(content) :]:
        axis.set_axis_off()
    words = ("worse by more than 0.001 nats", "changed by at most 0.001", "better by more than 0.001")
    handles = [Patch(color=colour(name), label=text) for name, text in zip(REGIONS, words, strict=True)]
    legend_below(figure, handles, columns=3 if columns > 1 else 1)
    return figure


def _histogram(axis: Any, title: str, found: Mapping[str, Any]) -> None:
    counts, edges = np.asarray(found["counts"], float), np.asarray(found["edges"], float)
    share = 100 * counts / counts.sum()
    middle = int(np.flatnonzero((edges[:-1] < 0) & (edges[1:] > 0))[0])
    place = np.arange(len(share))
    colours = [colour(REGIONS[0] if i < middle else REGIONS[1] if i == middle else REGIONS[2]) for i in place]
    axis.bar(place, share, width=0.9, color=colours, zorder=3)
    wanted = [-10, -1, -0.1, -0.01, 0.01, 0.1, 1, 10]
    ticks = [int(np.argmin(np.abs(edges - value))) - 0.5 for value in wanted]
    axis.set_xticks(ticks, [f"{value:g}".replace("-", "−") for value in wanted])
    axis.grid(axis="x", visible=False)
    axis.set_title(title)
    axis.set_xlabel(f"loss reduction, iteration {found['first']} to {found['final']} (nats)")
    axis.set_ylabel("tokens (%)")
    top = float(share.max())
    axis.set_ylim(0, 1.22 * top)
    spots = ((0.02, "left"), ((middle + 1.0) / (len(share) + 1), "center"), (0.98, "right"))
    for (x, side), name in zip(spots, REGIONS, strict=True):
        words = f"{100 * found[name]:.1f}%"
        axis.text(x, 0.98, words, transform=axis.transAxes, ha=side, va="top", color=INK, fontsize=9, fontweight="bold")


def draw_alignment(content: Sequence[tuple[str, Sequence[Mapping[str, Any]], float]], width: float = 8.6) -> Any:
    """Mean gain against continue probability: (title, bands, threshold) per panel; marker area says how many tokens."""
    columns = min(2, len(content))
    rows = -(-len(content) // columns)
    figure, grid = new_figure(width if columns > 1 else 5.6, 0.4 + 3.0 * rows, rows, columns)
    axes = np.atleast_1d(np.asarray(grid)).ravel()
    for axis, (title, bands, threshold) in zip(axes, content, strict=False):
        _bands(axis, title, bands, threshold)
    for axis in axes[len(content) :]:
        axis.set_axis_off()
    return figure


def _bands(axis: Any, title: str, bands: Sequence[Mapping[str, Any]], threshold: float) -> None:
    filled = [band for band in bands if band["tokens"] >= FEWEST and band["interval"]]
    x = np.array([band["probability"] for band in filled])
    y = np.array([band["gain"] for band in filled])
    low, high = np.array([band["interval"] for band in filled]).T if filled else (x, x)
    share = np.array([band["tokens"] for band in filled], float) / max(1, sum(band["tokens"] for band in bands))
    axis.axhline(0, color=MUTED, linewidth=0.9, zorder=1)
    axis.axvline(threshold, color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
    axis.plot(x, y, color=colour("tah2"), linewidth=1.2, zorder=3)
    axis.vlines(x, low, high, color=colour("tah2"), linewidth=1.3, alpha=0.8, zorder=3)
    axis.scatter(x, y, s=14 + 220 * share, color=colour("tah2"), zorder=4)
    axis.set_xlim(-0.04, 1.04)
    if len(y) and max(abs(low.min()), abs(high.max())) > WIDE:
        axis.set_yscale("symlog", linthresh=0.1)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
    axis.set_title(title)
    axis.set_xlabel("continue probability")
    axis.set_ylabel("gain of a further pass (nats)")
    axis.annotate(
        "threshold",
        (threshold, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        color=MUTED,
        fontsize=8,
    )
