"""Cross-iteration attention: mass by the depth of keys, and maps on one logarithmic colour scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.study.report.style import DEPTHS, INK, colour, new_figure

ROLE_TITLES = {
    "first": "most on the first iteration",
    "later": "most on later iterations",
    "both": "most evenly on all",
}
FLOOR = 1e-4
"""Weights below this look alike"""


def head_title(head: Mapping[str, Any]) -> str:
    return f"layer {head['layer'] + 1}, head {head['head'] + 1}\n{ROLE_TITLES[head['role']]}"


def draw_mass(heads: Sequence[Mapping[str, Any]], width: float = 8.6) -> Any:
    """Bars of mean mass per key depth for each head; whiskers are one standard deviation over sequences."""
    figure, grid = new_figure(width * len(heads) / 3, 2.9, 1, len(heads), sharey=True)
    axes = np.atleast_1d(np.asarray(grid)).ravel()
    for axis, head in zip(axes, heads, strict=True):
        mean, std = np.asarray(head["mean"]), np.asarray(head["std"])
        place = np.arange(1, len(mean) + 1)
        axis.bar(place, mean, width=0.72, color=colour("tah2-deep"), zorder=3)
        axis.errorbar(
            place,
            mean,
            yerr=[np.minimum(std, mean), std],
            fmt="none",
            ecolor=INK,
            elinewidth=1.0,
            capsize=2.5,
            zorder=4,
        )
        axis.set_xticks(place)
        axis.set_title(head_title(head), fontsize=9)
        axis.set_xlabel("iteration of the keys")
        axis.grid(axis="x", visible=False)
        axis.set_ylim(0, 1.02)
    axes[0].set_ylabel("attention mass")
    return figure


def draw_all_heads(mean: NDArray[np.float64], width: float = 8.6) -> Any:
    """Mass beyond the first iteration of every head: layers down, heads across."""
    later = 1 - mean[..., 0] / mean.sum(-1)
    layers, heads = later.shape
    figure, axis = new_figure(min(width, 2.2 + 0.42 * heads), max(2.2, 1.3 + 0.26 * layers))
    picture = axis.imshow(later, cmap=_shades(), vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(heads), [str(head + 1) for head in range(heads)])
    shown = range(0, layers, max(1, layers // 12))
    axis.set_yticks(list(shown), [str(layer + 1) for layer in shown])
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.grid(visible=False)
    figure.colorbar(picture, ax=axis, label="mass beyond iteration 1", shrink=0.9)
    return figure


def draw_maps(heads: Sequence[Mapping[str, Any]], maps: NDArray[np.float64], width: float = 8.6) -> Any:
    """Columns are heads, rows key depths; all share a logarithmic scale, grey where no query ran."""
    from matplotlib.colors import LogNorm, to_rgb

    reached = np.flatnonzero(np.isfinite(maps).any((0, 1, 3)))
    size = max(8, int(reached[-1]) + 1) if len(reached) else 8
    maps, depths = maps[..., :size, :size], maps.shape[1]
    known = maps[np.isfinite(maps) & (maps > 0)]
    top = float(known.max()) if len(known) else 1.0
    figure, grid = new_figure(
        0.9 + (width - 0.9) * len(heads) / 3, 0.9 + depths * min(2.5, 11.0 / depths), depths, len(heads),
        sharex=True, sharey=True,
    )  # fmt: skip
    axes = np.asarray(grid).reshape(depths, len(heads))
    shades = _shades().with_extremes(bad=(*to_rgb(colour("little")), 0.45))
    picture = None
    for row in range(depths):
        for column, head in enumerate(heads):
            axis = axes[row, column]
            panel = maps[column, row]
            seen = np.where(np.isfinite(panel), np.maximum(panel, FLOOR), np.nan)
            picture = axis.imshow(
                np.ma.masked_invalid(seen), cmap=shades, norm=LogNorm(FLOOR, max(top, 10 * FLOOR)),
                interpolation="nearest", rasterized=True,
            )  # fmt: skip
            axis.grid(visible=False)
            axis.set_anchor("C")
            if row == 0:
                axis.set_title(head_title(head), fontsize=8.5)
            if column == 0:
                axis.set_ylabel(f"keys of iteration {row + 1}\nquery position", fontsize=8)
            if row == depths - 1:
                axis.set_xlabel("key position")
    if picture is not None:
        figure.colorbar(picture, ax=axes.ravel().tolist(), label="mean attention weight", shrink=0.75, pad=0.02)
    return figure


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("iterations", list(DEPTHS))
