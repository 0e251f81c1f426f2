"""Draw the visibility rules as attention masks: `python docs/pictures.py FOLDER [svg|png]`.

Every picture shows four tokens. Rows are queries and columns are keys, both grouped by depth, as if the
key-value caches of the iterations were laid end to end. The shaded cells come from `tah2.visibility.dense_mask`,
the same function that the tests hold the fast paths to; nothing here knows a rule.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from tah2.visibility import BASE_STREAM, DUO_CAUSAL, LAST_EXITED, PER_ITERATION, Entries, Rule, dense_mask

SEEN, SEEN_BY_PROBE, HIDDEN, GRID, INK = "#5aa469", "#cfe8d5", "#f7f7f5", "#d8d8d4", "#30302e"


@dataclass(frozen=True)
class Picture:
    name: str
    rule: Rule
    executed: tuple[int, ...]
    ceiling: int
    """With a ceiling above a token's executed depth, the token gets one lookahead entry; 0 draws none."""

    @property
    def title(self) -> str:
        depths = ", ".join(map(str, self.executed))
        return f"{self.name}: tokens 1 to {len(self.executed)} run {depths} iterations"


PICTURES = (
    Picture("duo-causal", DUO_CAUSAL, (2, 1, 3, 1), 0),
    Picture("base-stream", BASE_STREAM, (2, 2, 2, 2), 0),
    Picture("per-iteration", PER_ITERATION, (2, 2, 2, 2), 0),
    Picture("last-exited", LAST_EXITED, (2, 1, 3, 1), 0),
    Picture("lookahead", DUO_CAUSAL, (2, 1, 3, 1), 3),
)


def entries_of(picture: Picture) -> Entries:
    """The picture's entries ordered by (depth, position), lookahead entries among them."""
    rows = []
    for position, last in enumerate(picture.executed):
        rows += [(depth, position, last, False) for depth in range(1, last + 1)]
        if last < picture.ceiling:
            rows.append((last + 1, position, last, True))
    depth, position, last, lookahead = map(torch.tensor, zip(*sorted(rows), strict=True))
    return Entries.of(torch.zeros_like(position), position, depth, last, lookahead)


def draw(picture: Picture, path: Path) -> None:
    """Draw one mask to `path`; the suffix chooses the format."""
    entries = entries_of(picture)
    mask = dense_mask(picture.rule, entries, entries)
    count = len(entries)
    figure, axes = plt.subplots(figsize=(0.46 * count + 1.6, 0.46 * count + 2.0), facecolor="white")
    for query in range(count):
        for key in range(count):
            probe = bool(entries.lookahead[query] | entries.lookahead[key])
            _cell(axes, query, key, bool(mask[query, key]), probe)
    _name_axes(axes, entries)
    axes.set_title(picture.title, fontsize=10, color=INK, pad=46)
    _legend(axes, bool(entries.lookahead.any()), count)
    figure.savefig(
        path, bbox_inches="tight", facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None
    )
    plt.close(figure)


def draw_all(folder: Path, suffix: str = "svg") -> list[Path]:
    """Draw every picture into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{picture.name}.{suffix}" for picture in PICTURES]
    with matplotlib.rc_context({"svg.hashsalt": "tah2", "font.family": "DejaVu Sans"}):
        for picture, path in zip(PICTURES, paths, strict=True):
            draw(picture, path)
    return paths


def _cell(axes: Axes, query: int, key: int, seen: bool, probe: bool) -> None:
    fill = (SEEN_BY_PROBE if probe else SEEN) if seen else HIDDEN
    axes.add_patch(Rectangle((key, query), 1, 1, facecolor=fill, edgecolor=GRID, linewidth=0.8))
    if probe and seen:
        inset = Rectangle((key + 0.1, query + 0.1), 0.8, 0.8, fill=False, edgecolor=SEEN, linewidth=1.2, linestyle="--")
        axes.add_patch(inset)


def _name_axes(axes: Axes, entries: Entries) -> None:
    """Token numbers along both edges (primed where the entry is a lookahead), one heading per depth."""
    count, depths = len(entries), entries.depth.tolist()
    names = [
        f"{position + 1}{'′' if probe else ''}"
        for position, probe in zip(entries.position.tolist(), entries.lookahead.tolist(), strict=True)
    ]
    starts = [i for i in range(count) if i == 0 or depths[i] != depths[i - 1]]
    for start, end in pairwise([*starts, count]):
        heading, middle = f"depth {depths[start]}", (start + end) / 2
        axes.text(middle, -0.7, heading, ha="center", va="center", fontsize=8.5, color=INK)
        axes.text(-0.75, middle, heading, ha="center", va="center", rotation=90, fontsize=8.5, color=INK)
        axes.plot([start, start], [0, count], color=INK, linewidth=1.4)
        axes.plot([0, count], [start, start], color=INK, linewidth=1.4)
    axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
    axes.set_xticks([i + 0.5 for i in range(count)], names)
    axes.set_yticks([i + 0.5 for i in range(count)], names)
    axes.tick_params(length=0, labelsize=8.5, labeltop=True, labelbottom=False, colors=INK, pad=2)
    axes.set_xlabel("keys (token)", fontsize=9, color=INK)
    axes.set_ylabel("queries (token)", fontsize=9, color=INK, labelpad=34)
    for side in axes.spines.values():
        side.set(color=INK, linewidth=1.4)


def _legend(axes: Axes, with_lookahead: bool, count: int) -> None:
    handles = [
        Patch(facecolor=SEEN, edgecolor=GRID, label="visible"),
        Patch(facecolor=HIDDEN, edgecolor=GRID, label="hidden"),
    ]
    if with_lookahead:
        handles.insert(
            1, Patch(facecolor=SEEN_BY_PROBE, edgecolor=SEEN, linestyle="--", label="visible to a lookahead (′)")
        )
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.9 / count), ncols=3, frameon=False, fontsize=8.5
    )


if __name__ == "__main__":
    target, *rest = sys.argv[1:] or ["docs/_generated"]
    for file in draw_all(Path(target), *rest):
        sys.stdout.write(f"{file}\n")
