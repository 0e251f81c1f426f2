"""Does looping every token pay? The loss reduction of each token from the first to the final iteration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.study.analyses.measure import TokenTable

LITTLE = 1e-3
"""A change of at most so many nats is little."""
LARGEST = 10.0
PER_DECADE = 6


@dataclass(frozen=True)
class Gains:
    """How many tokens became worse, changed little, or became better, and by how much."""

    first: int
    final: int
    tokens: int
    worse: float
    """Share of tokens whose loss rose by more than `LITTLE`"""
    little: float
    better: float
    mean: float
    """nats per token"""
    lost: float
    """nats per token that the worse tokens lost"""
    won: float
    edges: tuple[float, ...]
    """Ascending; the outermost bins take everything beyond them"""
    counts: tuple[int, ...]
    by_tag: dict[str, dict[str, float]]
    """Per kind of token: tokens, worse, little, better, mean"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def gains(table: TokenTable, names: dict[int, str] | None = None, final: int | None = None) -> Gains:
    """Gains from iteration 1 to `final` (the ceiling by default) of the tokens that executed it."""
    final = table.depths if final is None else final
    if final < 2:
        raise ValueError("A model that runs one iteration has no gain of a further one: analyse a looped model.")
    gain = (table.loss[:, 0] - table.loss[:, final - 1]).astype(np.float64)
    known = np.isfinite(gain)
    gain, tags = gain[known], table.tag[known]
    if not len(gain):
        raise ValueError(f"No token executed iteration {final}.")
    edges = bin_edges()
    inner = np.searchsorted(edges[1:-1], gain, side="right")
    by_tag = {name: _shares(gain[tags == tag]) for tag, name in (names or {}).items() if (tags == tag).any()}
    return Gains(
        first=1,
        final=final,
        edges=tuple(edges.tolist()),
        counts=tuple(np.bincount(inner, minlength=len(edges) - 1).tolist()),
        by_tag=by_tag,
        lost=float(gain[gain < -LITTLE].sum() / len(gain)),
        won=float(gain[gain > LITTLE].sum() / len(gain)),
        **_shares(gain),
    )


def _shares(gain: NDArray[np.float64]) -> dict[str, Any]:
    """tokens, worse, little, better, mean; the three shares add up to 1."""
    worse, better = float((gain < -LITTLE).mean()), float((gain > LITTLE).mean())
    little = float((np.abs(gain) <= LITTLE).mean())
    return {"tokens": len(gain), "worse": worse, "little": little, "better": better, "mean": float(gain.mean())}


def bin_edges() -> NDArray[np.float64]:
    """Logarithmic on both sides of one bin for little change: -10 .. -0.001, 0.001 .. 10."""
    decades = int(np.log10(LARGEST / LITTLE))
    positive = np.geomspace(LITTLE, LARGEST, decades * PER_DECADE + 1)
    return np.concatenate([-positive[::-1], positive])
