"""What `tah2 curves` says: rows for tables and CSV files, from the curves of one or more runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tah2.config.strict import ConfigError
from tah2.evals.curves import Curve, accuracy_at_compute, gain_at_compute, peak, shared_range, slope
from tah2.evals.scaling import RunCurves, votes
from tah2.evals.statistics import DRAWS, LEVEL, Interval, Resampling, mean_interval, percentile_interval

Row = dict[str, Any]
ALL = "mean"
"""Stands for all benchmarks together."""


@dataclass(frozen=True)
class ReportConfig:
    baseline: str | None = None
    """Label of the run that others are compared with; None: the first."""
    fit_to: int | None = None
    """Slopes are fitted through cutoffs up to this one; None: through all."""
    at: tuple[float, ...] = ()
    """Compute (FLOPs per response) at which accuracies are compared, beside the baseline's peak."""
    draws: int = DRAWS
    level: float = LEVEL
    vote_draws: int | None = None
    """None: votes are counted exactly."""


def comparable(runs: Sequence[RunCurves]) -> list[RunCurves]:
    """The runs with the benchmarks that all of them answered, on the same problems."""
    labels = [run.label for run in runs]
    if len(set(labels)) != len(labels):
        raise ConfigError(f"Two runs are called {_twice(labels)!r}; name them apart with '--labels'.")
    shared = [
        curve.task
        for curve in runs[0].tasks
        if all(curve.problems in [other.problems for other in run.tasks if other.task == curve.task] for run in runs)
    ]
    if not shared:
        raise ConfigError("These runs have no benchmark in common whose problems are the same.")
    return [run.only(shared) for run in runs]


def _twice(labels: Sequence[str]) -> str:
    return next(label for place, label in enumerate(labels) if label in labels[:place])


def point_rows(runs: Sequence[RunCurves], config: ReportConfig) -> list[Row]:
    """One row per run, benchmark and cutoff; the benchmarks' mean last."""
    rows = []
    for run in runs:
        for curve in run.tasks:
            for place, cutoff in enumerate(curve.cutoffs):
                interval = mean_interval(curve.accuracy[:, place], draws=config.draws, level=config.level)
                costs = {"flops": curve.flops, "seconds": curve.seconds}
                means = {name: None if cost is None else float(cost[:, place].mean()) for name, cost in costs.items()}
                rows.append(
                    {"run": run.label, "task": curve.task, "cutoff": cutoff, **_interval("accuracy", interval), **means}
                    | {"tokens": float(curve.tokens[place]), "mean_depth": float(curve.depth[place])}
                )
        rows += _mean_points(run, config)
    return rows


def _mean_points(run: RunCurves, config: ReportConfig) -> list[Row]:
    accuracy = np.concatenate([curve.accuracy for curve in run.tasks])
    resampling = Resampling([len(curve.accuracy) for curve in run.tasks], config.draws)
    replicates = resampling.means(accuracy)
    flops, seconds = run.against_flops(), run.against_seconds()
    rows = []
    for place, cutoff in enumerate(run.cutoffs):
        estimate = float(resampling.weights @ accuracy[:, place])
        interval = percentile_interval(estimate, replicates[:, place], config.level)
        rows.append(
            {"run": run.label, "task": ALL, "cutoff": cutoff, **_interval("accuracy", interval)}
            | {"flops": None if flops is None else float(flops.mean_compute()[place])}
            | {"seconds": None if seconds is None else float(seconds.mean_compute()[place])}
            | {"tokens": float(np.mean([curve.tokens[place] for curve in run.tasks]))}
            | {"mean_depth": float(np.mean([curve.depth[place] for curve in run.tasks]))}
        )
    return rows


def slope_rows(runs: Sequence[RunCurves], config: ReportConfig) -> list[Row]:
    """Accuracy per doubling of decoding FLOPs, in points, with R2 and an interval over problems."""
    rows = []
    for run in runs:
        curve = _fitted_part(run, config)
        if curve is None:
            continue
        fitted = slope(curve, draws=config.draws, level=config.level)
        rows.append(
            {"run": run.label, "from": run.cutoffs[0], "to": max(_fit_cutoffs(run, config))}
            | _interval("points_per_doubling", fitted.interval.scaled(100))
            | {"r_squared": fitted.line.r_squared, "intercept": fitted.line.intercept * 100}
        )
    return rows


def _fit_cutoffs(run: RunCurves, config: ReportConfig) -> list[int]:
    return [cutoff for cutoff in run.cutoffs if config.fit_to is None or cutoff <= config.fit_to]


def _fitted_part(run: RunCurves, config: ReportConfig) -> Curve | None:
    """The points that the slope is fitted through; None where a line makes no sense."""
    curve = run.against_flops()
    if curve is None:
        return None
    kept = [place for place in range(len(_fit_cutoffs(run, config))) if curve.mean_compute()[place] > 0]
    part = curve.points(kept)
    return part if len(np.unique(part.mean_compute())) > 1 else None


def matched_rows(runs: Sequence[RunCurves], config: ReportConfig) -> list[Row]:
    """Accuracy of every run at the same compute: where the baseline peaks, and wherever asked."""
    base = baseline_of(runs, config)
    base_curve = base.against_flops()
    if base_curve is None:
        return []
    top = float(base_curve.mean_compute()[peak(base_curve)])
    rows = []
    for run in runs:
        curve = run.against_flops()
        if curve is None:
            continue
        for where, at in [("baseline's peak", top), *(("as asked", each) for each in config.at)]:
            accuracy = accuracy_at_compute(curve, at, draws=config.draws, level=config.level)
            row = {"run": run.label, "at": where, "flops": at, **_interval("accuracy", accuracy)}
            if run is not base:
                gain = gain_at_compute(curve, base_curve, at, draws=config.draws, level=config.level)
                row |= _interval("gain", gain)
            rows.append(row)
    return rows


def baseline_of(runs: Sequence[RunCurves], config: ReportConfig) -> RunCurves:
    if config.baseline is None:
        return runs[0]
    found = [run for run in runs if run.label == config.baseline]
    if not found:
        raise ConfigError(f"No run is called {config.baseline!r}; they are {', '.join(run.label for run in runs)}.")
    return found[0]


def overlap_row(runs: Sequence[RunCurves]) -> Row | None:
    """The compute that all runs cover."""
    curves = [curve for run in runs if (curve := run.against_flops()) is not None]
    found = shared_range(curves) if len(curves) == len(runs) else None
    return None if found is None else {"from": found[0], "to": found[1]}


def vote_rows(runs: Sequence[RunCurves], config: ReportConfig) -> list[Row]:
    """cons@n over benchmarks whose answers can be compared; compute is n times a response's mean."""
    rows = []
    for run in runs:
        able = [curve for curve in run.tasks if curve.ballots]
        if not able:
            continue
        most = min(ballot.responses for curve in able for ballot in curve.ballots)
        credit = np.concatenate([votes(curve.ballots, most, config.vote_draws) for curve in able])
        resampling = Resampling([len(curve.ballots) for curve in able], config.draws)
        replicates = resampling.means(credit)
        costs = [None if curve.flops is None else float(curve.flops[:, -1].mean()) for curve in able]
        known = [cost for cost in costs if cost is not None]
        each = float(np.mean(known)) if len(known) == len(costs) else None
        for n in range(1, most + 1):
            interval = percentile_interval(
                float(resampling.weights @ credit[:, n - 1]), replicates[:, n - 1], config.level
            )
            rows.append(
                {"run": run.label, "tasks": "+".join(curve.task for curve in able), "n": n}
                | _interval("accuracy", interval)
                | {"flops": None if each is None else n * each}
            )
    return rows


def run_rows(runs: Sequence[RunCurves], config: ReportConfig) -> list[Row]:
    """Every run at its largest cutoff, with its depth ceilings: trained and used."""
    rows = []
    points = {(row["run"], row["task"]): row for row in point_rows(runs, config)}
    base = points[baseline_of(runs, config).label, ALL]
    for run in runs:
        mean = points[run.label, ALL]
        cost = _ratio(_ratio(mean["flops"], mean["tokens"]), _ratio(base["flops"], base["tokens"]))
        rows.append(
            {"run": run.label, "loop": run.loop, "trained_ceiling": run.trained_ceiling, "ceiling": run.ceiling}
            | {curve.task: points[run.label, curve.task]["accuracy"] for curve in run.tasks}
            | {name: mean[name] for name in ("accuracy", "accuracy_low", "accuracy_high", "mean_depth", "tokens")}
            | {"flops": mean["flops"], "flops_per_token_ratio": cost, "seconds": mean["seconds"]}
        )
    return rows


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _interval(name: str, interval: Interval) -> Row:
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One table; columns in order of first appearance, unknown values empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: "" if _unknown(value) else value for name, value in row.items()})


def _unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
