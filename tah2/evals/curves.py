"""Accuracy against compute: fitted slopes, accuracy at matched compute, and their intervals over problems.

A curve has one point per output-token cutoff (or per number of votes, or per any other setting). Each point holds,
per problem, the mean accuracy and the mean FLOPs of its responses, so that resampling problems moves both at once.
Accuracies are shares in [0, 1]; slopes are per doubling of FLOPs, so times 100 they are the paper's points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tah2.config.strict import ConfigError
from tah2.evals.statistics import (
    DRAWS,
    LEVEL,
    Floats,
    Interval,
    Line,
    Resampling,
    fit_line,
    fit_slopes,
    percentile_interval,
)


@dataclass(frozen=True)
class Curve:
    """Points over problems; `sizes` says how many problems, in order, belong to each benchmark."""

    accuracy: Floats
    """`[P, C]`: mean over the responses to problem p at point c."""
    compute: Floats
    """`[P, C]`: mean decoding FLOPs (or seconds, or tokens) per response."""
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.accuracy.shape != self.compute.shape or self.accuracy.ndim != 2:
            raise ConfigError("A curve needs one accuracy and one cost per problem and point.")
        if sum(self.sizes) != len(self.accuracy):
            raise ConfigError(f"Benchmarks of {sum(self.sizes)} problems cannot hold {len(self.accuracy)}.")

    @classmethod
    def of(cls, accuracy: ArrayLike, compute: ArrayLike, sizes: Sequence[int] | None = None) -> Curve:
        """From anything that looks like arrays `[P, C]`; by default one benchmark holds all problems."""
        accuracy = np.asarray(accuracy, dtype=np.float64)
        return cls(accuracy, np.asarray(compute, dtype=np.float64), tuple(sizes or (len(accuracy),)))

    @property
    def weights(self) -> Floats:
        return Resampling(self.sizes).weights

    def mean_accuracy(self) -> Floats:
        """`[C]`: mean over benchmarks of the mean over their problems."""
        return self.weights @ self.accuracy

    def mean_compute(self) -> Floats:
        return self.weights @ self.compute

    def points(self, keep: Sequence[int]) -> Curve:
        """The curve through some of its points."""
        chosen = list(keep)
        return Curve(self.accuracy[:, chosen], self.compute[:, chosen], self.sizes)

    def resampled(self, draws: int = DRAWS, seed: int = 0) -> tuple[Floats, Floats]:
        """Mean accuracy and mean compute of every bootstrap draw: two of `[draws, C]`."""
        both = Resampling(self.sizes, draws, seed).means(np.stack([self.accuracy, self.compute], 1))
        return both[:, 0], both[:, 1]


@dataclass(frozen=True)
class Slope:
    """Accuracy gained per doubling of compute."""

    line: Line
    """Accuracy on log2 compute."""
    interval: Interval
    """Of the slope, resampling problems."""


def slope(curve: Curve, *, draws: int = DRAWS, level: float = LEVEL, seed: int = 0) -> Slope:
    """The least-squares line of mean accuracy on log2 of mean compute, and its interval over problems."""
    _check_positive(curve)
    line = fit_line(np.log2(curve.mean_compute()), curve.mean_accuracy())
    accuracy, compute = curve.resampled(draws, seed)
    return Slope(line, percentile_interval(line.slope, fit_slopes(np.log2(compute), accuracy), level))


def accuracy_at(compute: ArrayLike, accuracy: ArrayLike, at: ArrayLike) -> Floats:
    """Accuracy at a given compute, linear in log2 compute between neighbouring points.

    `compute` and `accuracy` `[..., C]` are curves (leading axes: bootstrap draws), `at` `[...]` the compute asked for.
    Outside a curve's range the answer is not a number: nothing is extrapolated.
    """
    compute, accuracy = np.asarray(compute, dtype=np.float64), np.asarray(accuracy, dtype=np.float64)
    order = np.argsort(compute, axis=-1, kind="stable")
    x = np.log2(np.take_along_axis(compute, order, -1))
    y = np.take_along_axis(np.broadcast_to(accuracy, compute.shape), order, -1)
    wanted = np.broadcast_to(np.log2(np.asarray(at, dtype=np.float64)), x.shape[:-1])[..., None]
    inside = (wanted >= x[..., :1] - 1e-12) & (wanted <= x[..., -1:] + 1e-12)
    upper = np.clip((x < wanted).sum(-1, keepdims=True), 1, max(1, x.shape[-1] - 1))
    lower = upper - 1
    if x.shape[-1] == 1:
        return np.where(inside, y, np.nan)[..., 0]
    x0, x1 = np.take_along_axis(x, lower, -1), np.take_along_axis(x, upper, -1)
    y0, y1 = np.take_along_axis(y, lower, -1), np.take_along_axis(y, upper, -1)
    way = np.where(x1 > x0, (wanted - x0) / np.where(x1 > x0, x1 - x0, 1), 1.0)
    return np.asarray(np.where(inside, y0 + np.clip(way, 0, 1) * (y1 - y0), np.nan)[..., 0])


def accuracy_at_compute(
    curve: Curve, at: float, *, draws: int = DRAWS, level: float = LEVEL, seed: int = 0
) -> Interval:
    """Mean accuracy at `at` FLOPs per response, interpolated, with an interval over problems."""
    estimate = float(accuracy_at(curve.mean_compute(), curve.mean_accuracy(), at))
    accuracy, compute = curve.resampled(draws, seed)
    return percentile_interval(estimate, accuracy_at(compute, accuracy, at), level)


def gain_at_compute(
    curve: Curve, baseline: Curve, at: float, *, draws: int = DRAWS, level: float = LEVEL, seed: int = 0
) -> Interval:
    """`curve` minus `baseline` at the same compute; both answered the same problems, which are resampled in pairs."""
    if curve.sizes != baseline.sizes:
        raise ConfigError("Two curves are compared on the same problems; these have different ones.")
    here = accuracy_at(curve.mean_compute(), curve.mean_accuracy(), at)
    there = accuracy_at(baseline.mean_compute(), baseline.mean_accuracy(), at)
    (mine, my_compute), (its, its_compute) = curve.resampled(draws, seed), baseline.resampled(draws, seed)
    replicates = accuracy_at(my_compute, mine, at) - accuracy_at(its_compute, its, at)
    return percentile_interval(float(here - there), replicates, level)


def shared_range(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Compute that all curves cover; None where there is none."""
    means = [curve.mean_compute() for curve in curves]
    low, high = max(float(mean.min()) for mean in means), min(float(mean.max()) for mean in means)
    return (low, high) if low <= high else None


def peak(curve: Curve) -> int:
    """The point of the highest mean accuracy; the cheapest one where several share it."""
    accuracy, compute = curve.mean_accuracy(), curve.mean_compute()
    best = np.flatnonzero(accuracy >= accuracy.max() - 1e-12)
    return int(best[np.argmin(compute[best])])


def _check_positive(curve: Curve) -> None:
    if not (curve.mean_compute() > 0).all():
        raise ConfigError("Compute must be positive at every point; leave out cutoffs below two tokens.")
