"""Means, bootstrap intervals and straight lines. Plain arrays in, plain numbers out.

Problems are what is resampled: a benchmark is a draw from the problems that it could have held, and repeats of one
problem are no further evidence about another. With several benchmarks, problems are resampled within each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tah2.config.strict import ConfigError

Floats = NDArray[np.float64]

DRAWS = 10_000
LEVEL = 0.95
_AT_ONCE = 4_000_000
"""Random indices drawn in one piece."""


@dataclass(frozen=True)
class Interval:
    """An estimate and where it lies with probability `level`."""

    estimate: float
    low: float
    high: float
    level: float = LEVEL

    def scaled(self, factor: float) -> Interval:
        return Interval(self.estimate * factor, self.low * factor, self.high * factor, self.level)


def mean_interval(values: ArrayLike, *, draws: int = DRAWS, level: float = LEVEL, seed: int = 0) -> Interval:
    """The mean of `values` `[P]` (one number per problem) with a percentile bootstrap interval over problems."""
    values = np.asarray(values, dtype=np.float64)
    return percentile_interval(float(values.mean()), Resampling([len(values)], draws, seed).means(values), level)


def percentile_interval(estimate: float, replicates: ArrayLike, level: float = LEVEL) -> Interval:
    """`estimate` between the percentiles of its bootstrap `replicates` `[draws]`; undefined replicates are left out."""
    kept = np.asarray(replicates, dtype=np.float64)
    kept = kept[np.isfinite(kept)]
    if not len(kept):
        return Interval(estimate, float("nan"), float("nan"), level)
    tail = 50 * (1 - level)
    low, high = np.percentile(kept, [tail, 100 - tail])
    return Interval(estimate, float(low), float(high), level)


class Resampling:
    """Bootstrap draws of the problems of one or more benchmarks, each benchmark drawn from its own problems.

    The same draws serve every curve of a comparison: models answer the same problems, so their difference is resampled
    in pairs.
    """

    def __init__(self, sizes: Sequence[int], draws: int = DRAWS, seed: int = 0) -> None:
        if not sizes or min(sizes) < 1:
            raise ConfigError("There is nothing to resample: a benchmark has no problems.")
        self.sizes, self.draws, self.seed = tuple(sizes), draws, seed

    @property
    def weights(self) -> Floats:
        """`[P]`: what each problem counts in the mean over benchmarks of the mean over their problems; sums to 1."""
        return np.concatenate([np.full(size, 1 / (size * len(self.sizes))) for size in self.sizes])

    def means(self, values: ArrayLike) -> Floats:
        """The mean of `values` `[P, ...]` in every bootstrap draw: `[draws, ...]`, on average `weights @ values`."""
        values = np.asarray(values, dtype=np.float64)
        drawn = np.zeros((self.draws, *values.shape[1:]))
        for rows, columns, counts in self._counts():
            drawn[rows] += np.tensordot(counts, values[columns] * self._weight(columns), 1)
        return drawn

    def shares(self) -> Floats:
        """`[draws, P]`: what each problem counts in each draw, for few problems: `means` needs no such table."""
        table = np.zeros((self.draws, sum(self.sizes)))
        for rows, columns, counts in self._counts():
            table[rows, columns] = counts * self._weight(columns)
        return table

    def _weight(self, columns: slice) -> float:
        return 1 / ((columns.stop - columns.start) * len(self.sizes))

    def _counts(self) -> Iterator[tuple[slice, slice, Floats]]:
        """(draws, problems, how often each of these problems comes in each of these draws), piece by piece.

        Every benchmark has a stream of its own, so that its draws do not depend on the others.
        """
        first = 0
        for number, size in enumerate(self.sizes):
            random = np.random.default_rng([self.seed, number] if number else self.seed)
            piece = max(1, _AT_ONCE // size)
            for start in range(0, self.draws, piece):
                rows = slice(start, min(start + piece, self.draws))
                chosen = random.integers(0, size, (rows.stop - rows.start, size))
                flat = (chosen + np.arange(len(chosen))[:, None] * size).ravel()
                counts = np.bincount(flat, minlength=len(chosen) * size).reshape(len(chosen), size)
                yield rows, slice(first, first + size), counts.astype(np.float64)
            first += size


@dataclass(frozen=True)
class Line:
    """The least-squares line y = intercept + slope * x."""

    slope: float
    intercept: float
    r_squared: float
    """1 where all y are equal and so explained by any line of slope 0."""
    slope_error: float
    """Standard error of the slope; not a number with fewer than three points."""
    points: int

    def at(self, x: ArrayLike) -> Floats:
        return np.asarray(self.intercept + self.slope * np.asarray(x, dtype=np.float64))

    def slope_interval(self, level: float = LEVEL) -> Interval:
        """Student's interval, as of independent normal errors (points of one curve share problems: see `curves`)."""
        from scipy.special import stdtrit

        reach = float(stdtrit(self.points - 2, (1 + level) / 2)) * self.slope_error if self.points > 2 else float("nan")
        return Interval(self.slope, self.slope - reach, self.slope + reach, level)


def fit_line(x: ArrayLike, y: ArrayLike) -> Line:
    """Least squares through the points (x, y)."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ConfigError(f"A line needs at least two points, but there are {x.size} x and {y.size} y.")
    across, up = x - x.mean(), y - y.mean()
    spread, total = float(across @ across), float(up @ up)
    if spread == 0:
        raise ConfigError("A line needs points at two different x.")
    slope = float(across @ up) / spread
    left = float(((up - slope * across) ** 2).sum())
    error = float(np.sqrt(left / (len(x) - 2) / spread)) if len(x) > 2 else float("nan")
    r_squared = 1 - left / total if total > 0 else 1.0
    return Line(slope, float(y.mean() - slope * x.mean()), r_squared, error, len(x))


def fit_slopes(x: ArrayLike, y: ArrayLike) -> Floats:
    """Slopes of many lines at once: x and y `[draws, points]` -> `[draws]`."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    across = x - x.mean(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((across * (y - y.mean(-1, keepdims=True))).sum(-1) / (across**2).sum(-1))
