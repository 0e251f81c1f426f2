"""The numbers of a study, from its raw records; tables, figures and `summary.json` all take them from here.

A variant was trained U times (units: pairs of a base seed and a post-training seed) and answered P problems, several
times each. Its accuracy at a cutoff is the mean over units, families and problems, families weighing alike. Intervals
are two-level bootstraps: bases (and seeds within them) are drawn with replacement, and so are the problems of each
family; the same draws serve every variant, so differences are taken in pairs. Three bases drawn from three vary too
little, by a factor of sqrt(2/3) in the standard deviation; draws are widened by its inverse. One base has no spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError
from tah2.evals.consensus import Ballot, consensus_exact
from tah2.evals.curves import accuracy_at
from tah2.evals.statistics import Floats, Interval, Line, Resampling, fit_line, fit_slopes, percentile_interval
from tah2.study.layout import GradeRow, Results, UnitResult

DRAWS = 2000


@dataclass(frozen=True)
class Runs:
    """The responses of one variant: U units, P problems grouped by family, C output-token cutoffs."""

    accuracy: Floats
    """`[U, P, C]`: share of right responses to a problem, cut off at c"""
    compute: Floats
    """`[U, P, C]`: mean decoding FLOPs of a response, cut off at c"""
    sizes: tuple[int, ...]
    """Problems of each family, in order; sums to P"""
    seeds: tuple[tuple[int, int], ...]
    """`[U]`: (base seed, seed)"""
    fitted: int | None = None
    """Slopes are of the first so many cutoffs; of all by default"""

    @property
    def weights(self) -> Floats:
        """`[P]`: each family counts alike"""
        return Resampling(self.sizes).weights

    def mean_accuracy(self) -> Floats:
        """`[C]`"""
        return np.asarray(self.accuracy.mean(0).T @ self.weights)

    def mean_compute(self) -> Floats:
        """`[C]`"""
        return np.asarray(self.compute.mean(0).T @ self.weights)

    def by_unit(self) -> Floats:
        """`[U, C]`: accuracy of each unit"""
        return np.einsum("upc,p->uc", self.accuracy, self.weights)

    @cached_property
    def draws(self) -> tuple[Floats, Floats]:
        """Accuracy and compute `[DRAWS, C]` of every bootstrap draw."""
        units, problems = _draws(self.seeds, self.sizes)
        return _mixed(units, problems, self.accuracy), _mixed(units, problems, self.compute)


def _mixed(units: Floats, problems: Floats, values: Floats) -> Floats:
    """Weighted means `[DRAWS, C]` of values `[U, P, C]` under unit weights `[DRAWS, U]` and problem weights."""
    mixed = np.zeros((len(units), values.shape[-1]))
    for unit in range(values.shape[0]):
        mixed += units[:, unit, None] * (problems @ values[unit])
    return mixed


@lru_cache(maxsize=64)
def _draws(seeds: tuple[tuple[int, int], ...], sizes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Weights of units `[DRAWS, U]` and of problems `[DRAWS, P]`.

    Bases are drawn first, then seeds within each drawn base. The order of random numbers depends on `seeds` alone, so
    variants that were trained with the same seeds share their draws. With n bases, deviations from equal weights are
    widened by sqrt(n / (n - 1)), so that the draws of a mean vary as its standard error says.
    """
    bases = sorted({base for base, _ in seeds})
    random = np.random.default_rng(len(bases))
    units = np.zeros((DRAWS, len(seeds)))
    drawn = random.multinomial(len(bases), np.full(len(bases), 1 / len(bases)), size=DRAWS)
    for column, base in enumerate(bases):
        members = [i for i, (own, _) in enumerate(seeds) if own == base]
        for draw in range(DRAWS):
            times = int(drawn[draw, column]) * len(members)
            units[draw, members] = random.multinomial(times, np.full(len(members), 1 / len(members)))
    units, equal = units / units.sum(1, keepdims=True), 1 / len(seeds)
    if len(bases) > 1:
        units = equal + (units - equal) * np.sqrt(len(bases) / (len(bases) - 1))
    return units, Resampling(sizes, DRAWS).shares()


def runs_of(results: Results, variant: str, task: str | None = None) -> Runs:
    """The responses of a variant to all families of problems, or to one."""
    return replace(runs_of_units(results.of(variant), results.cutoffs, task), fitted=results.fitted)


def runs_of_units(units: Sequence[UnitResult], cutoffs: Sequence[int], task: str | None = None) -> Runs:
    answered = [unit for unit in units if unit.grades and _fits(unit, cutoffs)]
    if not answered:
        raise ConfigError("These units gave no graded responses.")
    tables = [_by_problem(row for row in unit.grades if task in (None, row.task)) for unit in answered]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    if not shared:
        raise ConfigError(f"No problem{'' if task is None else f' of {task}'} was answered by every unit.")
    families = [family for family, _ in shared]
    return Runs(
        accuracy=np.array([[_right(table[key], cutoffs) for key in shared] for table in tables]),
        compute=np.array([[_spent(table[key]) for key in shared] for table in tables]),
        sizes=tuple(families.count(family) for family in dict.fromkeys(families)),
        seeds=tuple((unit.info.base_seed, unit.info.seed) for unit in answered),
    )


def _fits(unit: UnitResult, cutoffs: Sequence[int]) -> bool:
    """Were the responses graded at these cutoffs? A unit of an earlier version of the study may not have been."""
    return all(len(row.flops_at) == len(cutoffs) for row in unit.grades)


def _by_problem(rows: Iterable[GradeRow]) -> dict[tuple[str, str], list[GradeRow]]:
    found: dict[tuple[str, str], list[GradeRow]] = {}
    for row in rows:
        found.setdefault((row.task, row.problem), []).append(row)
    return found


def _right(rows: Sequence[GradeRow], cutoffs: Sequence[int]) -> list[float]:
    return [sum(row.correct and row.tokens <= cutoff for row in rows) / len(rows) for cutoff in cutoffs]


def _spent(rows: Sequence[GradeRow]) -> NDArray[np.float64]:
    return np.array([row.flops_at for row in rows], dtype=np.float64).mean(0)


def accuracy(runs: Runs) -> Interval:
    """At the largest cutoff, over all families."""
    return percentile_interval(float(runs.mean_accuracy()[-1]), runs.draws[0][:, -1])


@dataclass(frozen=True)
class Slope:
    line: Line
    """Accuracy on log2 of FLOPs per response"""
    interval: Interval
    """Of accuracy per doubling"""


def slope(runs: Runs) -> Slope:
    """Accuracy gained per doubling of decoding FLOPs, a line over the cutoffs."""
    line = fit_line(np.log2(runs.mean_compute()[: runs.fitted]), runs.mean_accuracy()[: runs.fitted])
    return Slope(line, percentile_interval(line.slope, _drawn_slopes(runs)))


def _drawn_slopes(runs: Runs) -> Floats:
    """`[DRAWS]`"""
    accuracies, compute = (values[:, : runs.fitted] for values in runs.draws)
    return fit_slopes(np.log2(compute), accuracies)


def slope_difference(runs: Runs, baseline: Runs) -> Interval:
    """Accuracy per doubling of decoding FLOPs, less the baseline's."""
    estimate = slope(runs).line.slope - slope(baseline).line.slope
    return percentile_interval(estimate, _drawn_slopes(runs) - _drawn_slopes(baseline))


def gain(runs: Runs, baseline: Runs) -> Interval:
    """Accuracy at the largest cutoff, less the baseline's."""
    estimate = float(runs.mean_accuracy()[-1] - baseline.mean_accuracy()[-1])
    return percentile_interval(estimate, runs.draws[0][:, -1] - baseline.draws[0][:, -1])


@dataclass(frozen=True)
class Matched:
    """Two variants at the same decoding FLOPs per response."""

    flops: float
    accuracy: float
    baseline: float
    gain: Interval


def matched(runs: Runs, baseline: Runs, own: bool = False) -> Matched | None:
    """`runs` beside the baseline at the compute at which the baseline is at its best, or at `own` full compute.

    Accuracy is interpolated between cutoffs. Beyond its last cutoff a model has said all it has to say, and keeps its
    accuracy. None where the cheapest cutoff of one of them costs more than that.
    """
    place = int(np.argmax(baseline.mean_accuracy()))

    def compared(mine: Floats, my_compute: Floats, its: Floats, its_compute: Floats) -> tuple[Floats, Floats, Floats]:
        at = my_compute[..., -1] if own else its_compute[..., place]
        here = accuracy_at(my_compute, mine, np.minimum(at, my_compute[..., -1]))
        there = accuracy_at(its_compute, its, np.minimum(at, its_compute[..., -1]))
        return at, here, there

    points = runs.mean_accuracy(), runs.mean_compute(), baseline.mean_accuracy(), baseline.mean_compute()
    at, here, there = (float(value) for value in compared(*points))
    if np.isnan(here) or np.isnan(there):
        return None
    _, drawn, their_drawn = compared(*runs.draws, *baseline.draws)
    return Matched(at, here, there, percentile_interval(here - there, drawn - their_drawn))


def best_within(compute: Floats, accuracy: Floats, at: Floats) -> Floats:
    """The best accuracy that a mean budget of `at` `[...]` FLOPs per response buys.

    `compute` and `accuracy` `[..., C]` are the curve over cutoffs. A budget need not be spent with one cutoff for all:
    drawing each problem's cutoff from two of them (answering nothing is one, at no cost) gives every point on the line
    between theirs. So what counts is the highest such line; spending less than the budget is allowed too.
    """
    nothing = np.zeros((*compute.shape[:-1], 1))
    x, y = np.concatenate([nothing, compute], -1), np.concatenate([nothing, accuracy], -1)
    wanted = np.asarray(at)[..., None]
    best = np.where(x <= wanted, y, 0.0).max(-1)
    for cheap in range(x.shape[-1] - 1):
        for dear in range(cheap + 1, x.shape[-1]):
            x0, x1, y0, y1 = x[..., cheap], x[..., dear], y[..., cheap], y[..., dear]
            inside = (x0 <= wanted[..., 0]) & (wanted[..., 0] < x1)
            share = np.where(inside, (wanted[..., 0] - x0) / np.where(inside, x1 - x0, 1.0), 0.0)
            best = np.maximum(best, np.where(inside, y0 + share * (y1 - y0), 0.0))
    return np.asarray(best)


def matched_mean(runs: Runs, baseline: Runs) -> Matched:
    """Both spend the same mean budget as well as they can: the compute at which the baseline is at its best."""
    place = int(np.argmax(baseline.mean_accuracy()))

    def compared(mine: Floats, my_compute: Floats, its: Floats, its_compute: Floats) -> tuple[Floats, Floats, Floats]:
        at = its_compute[..., place]
        return at, best_within(my_compute, mine, at), best_within(its_compute, its, at)

    points = runs.mean_accuracy(), runs.mean_compute(), baseline.mean_accuracy(), baseline.mean_compute()
    at, here, there = (float(value) for value in compared(*points))
    _, drawn, their_drawn = compared(*runs.draws, *baseline.draws)
    return Matched(at, here, there, percentile_interval(here - there, drawn - their_drawn))


def flops_per_token(units: Sequence[UnitResult]) -> float | None:
    """All decoding FLOPs over all generated tokens, mean over units; None without responses."""
    found = [
        sum(row.flops for row in unit.grades) / sum(row.tokens for row in unit.grades) for unit in units if unit.grades
    ]
    return float(np.mean(found)) if found else None


def mean_depth(units: Sequence[UnitResult]) -> float | None:
    """Iterations per generated token, mean over units; None without responses."""
    found = [
        sum(row.depth * row.tokens for row in unit.grades) / sum(row.tokens for row in unit.grades)
        for unit in units
        if unit.grades
    ]
    return float(np.mean(found)) if found else None


@dataclass(frozen=True)
class Spread:
    """One number of each unit of a variant."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


def spread(units: Sequence[UnitResult], read: Callable[[UnitResult], float]) -> Spread | None:
    """What `read` finds in each unit whose file is there; None where none is."""
    values = []
    for unit in units:
        try:
            values.append(float(read(unit)))
        except (ConfigError, KeyError):
            continue
    return Spread(tuple(values)) if values else None


def validation_loss(units: Sequence[UnitResult]) -> Spread | None:
    return spread(units, lambda unit: unit.validation["loss"])


@dataclass(frozen=True)
class Votes:
    """cons@n for n = 1 .. R."""

    accuracy: Floats
    """`[R]`"""
    compute: Floats
    """`[R]`: n times the mean FLOPs of one response"""
    by_unit: Floats
    """`[U, R]`"""


def votes(units: Sequence[UnitResult]) -> Votes | None:
    """Majority votes over the recorded responses, families weighing alike; None below two responses a problem."""
    curves, costs = [], []
    for unit in units:
        table = _by_problem(unit.grades)
        if not table or min(len(rows) for rows in table.values()) < 2:
            continue
        most = min(len(rows) for rows in table.values())
        families: dict[str, list[Floats]] = {}
        for (family, _), rows in table.items():
            ballot = Ballot.of([row.answer or None for row in rows], [float(row.correct) for row in rows])
            families.setdefault(family, []).append(consensus_exact(ballot)[:most])
        curves.append(np.mean([np.mean(found, axis=0) for found in families.values()], axis=0))
        cost = {family: [row.flops for row in unit.grades if row.task == family] for family in families}
        costs.append(float(np.mean([np.mean(found) for found in cost.values()])))
    if not curves:
        return None
    shortest = min(len(curve) for curve in curves)
    by_unit = np.array([curve[:shortest] for curve in curves])
    each = float(np.mean(costs))
    return Votes(by_unit.mean(0), each * np.arange(1, shortest + 1, dtype=np.float64), by_unit)


def same_seeds(results: Results, variant: str, reference: str) -> tuple[Runs, Runs] | None:
    """The responses of two variants from the pairs of seeds that both have; None where they share none."""
    mine, theirs = (
        {(unit.info.base_seed, unit.info.seed): unit for unit in results.of(name) if unit.grades}
        for name in (variant, reference)
    )
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return None
    first = runs_of_units([mine[seeds] for seeds in shared], results.cutoffs)
    second = runs_of_units([theirs[seeds] for seeds in shared], results.cutoffs)
    return first, second
