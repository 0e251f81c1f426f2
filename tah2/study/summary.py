"""The machine-readable results of a study: one row per variant, comparisons at matched compute, and the claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tah2.config.strict import ConfigError
from tah2.evals.manifest import commit
from tah2.evals.statistics import Interval
from tah2.study import numbers
from tah2.study.claims import claims_of
from tah2.study.layout import Results, UnitResult


def summarise(results: Results) -> dict[str, Any]:
    """What `summary.json` holds; every number is computed from raw records."""
    return _finite(
        {
            "title": results.study["title"],
            "made_by": {"command": results.command, "commit": commit()},
            "baseline": results.baseline,
            "variants": [variant_row(results, name) for name in results.variants],
            "matched_compute": matched_rows(results),
            "claims": claims_of(results),
        }
    )


def variant_row(results: Results, name: str) -> dict[str, Any]:
    """One variant over all of its seeds."""
    units = results.of(name)
    info = units[0].info
    row: dict[str, Any] = {
        "name": name,
        "title": info.title,
        "group": info.group,
        "loop": info.loop,
        "max_depth": info.max_depth,
        "ceiling": info.ceiling,
        "seeds": [[unit.info.base_seed, unit.info.seed] for unit in units],
        "learning_rate": info.learning_rate,
        **loss_of(units),
        **training_of(units),
    }
    return {**row, **responses_of(results, units)}


def loss_of(units: Sequence[UnitResult]) -> dict[str, Any]:
    """Validation loss: mean over units, each unit's, and the depth that tokens took."""
    found = numbers.validation_loss(units)
    depth = numbers.spread(units, lambda unit: unit.validation["depth/mean"])
    return {
        "validation_loss": None if found is None else found.mean,
        "validation_losses": [] if found is None else list(found.values),
        "validation_depth": None if depth is None else depth.mean,
    }


def training_of(units: Sequence[UnitResult]) -> dict[str, Any]:
    """Mean training cost of one unit: FLOPs as they ran, by the paper's formula, and seconds."""
    names = {"training_flops": "flops", "training_flops_paper": "flops_paper", "training_seconds": "seconds"}
    found = {key: numbers.spread(units, partial(_trained, name)) for key, name in names.items()}
    return {key: None if value is None else value.mean for key, value in found.items()}


def _trained(name: str, unit: UnitResult) -> float:
    return float(unit.training[name])


def responses_of(results: Results, units: Sequence[UnitResult]) -> dict[str, Any]:
    """Accuracy, compute and slope; null where the variant answered nothing."""
    empty = ("accuracy", "accuracy_interval", "flops_per_token", "mean_depth", "slope", "slope_interval", "consensus")
    if not any(unit.grades for unit in units):
        return dict.fromkeys(empty)
    runs = numbers.runs_of(results, units[0].info.variant)
    accuracy, vote = numbers.accuracy(runs), numbers.votes(units)
    row: dict[str, Any] = {
        "accuracy": accuracy.estimate,
        "accuracy_interval": ends(accuracy),
        "accuracy_by_unit": [float(value) for value in runs.by_unit()[:, -1]],
        "accuracy_by_task": {
            task: float(numbers.runs_of_units(units, results.cutoffs, task).mean_accuracy()[-1])
            for task in results.tasks
        },
        "exact": exact_share(units),
        "flops_per_token": numbers.flops_per_token(units),
        "mean_depth": numbers.mean_depth(units),
        "curve": {
            "cutoffs": list(results.cutoffs),
            "flops": [float(value) for value in runs.mean_compute()],
            "accuracy": [float(value) for value in runs.mean_accuracy()],
        },
        "consensus": None if vote is None else [float(value) for value in vote.accuracy],
    }
    try:
        slope = numbers.slope(runs)
        row |= {"slope": slope.line.slope, "slope_interval": ends(slope.interval), "slope_r2": slope.line.r_squared}
    except ConfigError:
        row |= {"slope": None, "slope_interval": None, "slope_r2": None}
    return row


def exact_share(units: Sequence[UnitResult]) -> float:
    """Responses whose whole trace is right, mean over units."""
    shares = [sum(row.exact for row in unit.grades) / len(unit.grades) for unit in units if unit.grades]
    return sum(shares) / len(shares)


def matched_rows(results: Results) -> list[dict[str, Any]]:
    """Each variant of the main table beside the baseline, and the main variant beside every other.

    `gain` is in accuracy at a mean budget per response, the compute where the one that it is set against is at its
    best, both spending it as well as they can (`numbers.best_within`). `one_cutoff` is the same with one output-token
    cutoff for all responses, `own_compute` where both have said all they have to say (null where a curve begins later).
    """
    names = [name for name in results.group("main") if any(unit.grades for unit in results.of(name))]
    if results.baseline not in names:
        return []
    main = main_variant(results)
    pairs = [(name, results.baseline) for name in names if name != results.baseline]
    pairs += [(main, name) for name in names if main in names and name not in (main, results.baseline)]
    return [matched_row(results, name, against) for name, against in pairs]


def matched_row(results: Results, name: str, against: str) -> dict[str, Any]:
    mine, its = numbers.runs_of(results, name), numbers.runs_of(results, against)
    found = numbers.matched_mean(mine, its)
    return {
        "name": name,
        "against": against,
        "flops": found.flops,
        "accuracy": found.accuracy,
        "accuracy_against": found.baseline,
        "gain": found.gain.estimate,
        "interval": ends(found.gain),
        "one_cutoff": _gain(numbers.matched(mine, its)),
        "own_compute": _gain(numbers.matched(mine, its, own=True)),
    }


def _gain(found: numbers.Matched | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"flops": found.flops, "gain": found.gain.estimate, "interval": ends(found.gain)}


def main_variant(results: Results) -> str:
    """The variant that the claims are about."""
    stated: str | None = results.study.get("main")
    return stated or next(iter(results.kind("tah2").values()), results.baseline)


def ends(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
