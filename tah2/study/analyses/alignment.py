"""Does the decider ask for passes that help? The gain of a further pass against the continue probability."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.study.analyses.measure import TokenTable

BINS = 20
NEAR = 0.1
"""Half the width of the band around the threshold."""
RESAMPLES = 1000
MASS = 0.95


@dataclass(frozen=True)
class Band:
    """Tokens whose continue probability lies in [low, high): how many, and their mean gain with its interval."""

    low: float
    high: float
    tokens: int
    probability: float | None
    """Mean continue probability; None for an empty band"""
    gain: float | None
    interval: tuple[float, float] | None
    """95%, bootstrapped over documents"""


@dataclass(frozen=True)
class DepthAlignment:
    """What the decider knew after one depth."""

    depth: int
    tokens: int
    bands: tuple[Band, ...]
    near_threshold: Band
    stopped: Band
    """All tokens below the threshold"""
    continued: Band
    correlation: float | None
    """Spearman's, between probability and gain; None where one of them is constant"""


@dataclass(frozen=True)
class Alignment:
    threshold: float
    depths: tuple[DepthAlignment, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def alignment(table: TokenTable, threshold: float, seed: int = 0) -> Alignment:
    """For every depth below the ceiling, the tokens that executed it, grouped by continue probability."""
    if not np.isfinite(table.continue_prob).any():
        raise ValueError("This model has no decider, so there is no continue probability to hold gains against.")
    found = [_at_depth(table, depth, threshold, seed) for depth in range(1, table.depths)]
    return Alignment(threshold, tuple(part for part in found if part is not None))


def _at_depth(table: TokenTable, depth: int, threshold: float, seed: int) -> DepthAlignment | None:
    probability, gain = table.continue_prob[:, depth - 1].astype(np.float64), table.gain(depth).astype(np.float64)
    known = np.isfinite(probability) & np.isfinite(gain)
    if not known.any():
        return None
    probability, gain, document = probability[known], gain[known], table.document[known]
    resampled = _resamples(document, seed)

    def band(low: float, high: float, last: bool = False) -> Band:
        inside = (probability >= low) & ((probability <= high) if last else (probability < high))
        return _band(low, high, inside, probability, gain, document, resampled)

    edges = np.linspace(0, 1, BINS + 1).tolist()
    return DepthAlignment(
        depth=depth,
        tokens=len(gain),
        bands=tuple(band(low, high, high == 1.0) for low, high in pairwise(edges)),
        near_threshold=band(max(0.0, threshold - NEAR), min(1.0, threshold + NEAR), last=True),
        stopped=band(0.0, threshold),
        continued=band(threshold, 1.0, last=True),
        correlation=_spearman(probability, gain),
    )


def _resamples(document: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """How often each document is drawn, long `[RESAMPLES, documents]`."""
    count = int(document.max()) + 1
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)


def _band(
    low: float,
    high: float,
    inside: NDArray[np.bool_],
    probability: NDArray[np.float64],
    gain: NDArray[np.float64],
    document: NDArray[np.int64],
    resampled: NDArray[np.int64],
) -> Band:
    count = int(inside.sum())
    if count == 0:
        return Band(low, high, 0, None, None, None)
    sums = np.bincount(document[inside], gain[inside], minlength=resampled.shape[1])
    tokens = np.bincount(document[inside], minlength=resampled.shape[1])
    drawn = resampled @ tokens
    means = (resampled @ sums)[drawn > 0] / drawn[drawn > 0]
    edge = (1 - MASS) / 2
    interval = (float(np.quantile(means, edge)), float(np.quantile(means, 1 - edge)))
    return Band(low, high, count, float(probability[inside].mean()), float(gain[inside].mean()), interval)


def _spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    ranked = [_ranks(values) for values in (x, y)]
    if any(ranks.std() == 0 for ranks in ranked):
        return None
    return float(np.corrcoef(ranked[0], ranked[1])[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ties share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[inverse]
