"""Scores of a run: accuracy with an interval over problems, depth, and what the responses cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tah2.config.strict import ConfigError
from tah2.evals.grade_run import GradedRun
from tah2.evals.grades import undecided
from tah2.evals.manifest import write_whole
from tah2.evals.records import ERROR, SampleRecord
from tah2.evals.run_conversation import LENGTH
from tah2.evals.statistics import DRAWS, LEVEL, Floats, Interval, Resampling, mean_interval, percentile_interval

FILE_NAME = "scores.json"


@dataclass(frozen=True)
class TaskScore:
    task: str
    title: str
    metric: str
    problems: int
    responses: int
    missing: int
    """Responses that the run still lacks; the score is of those that are there."""
    failed: int
    """Responses that could not be generated; they count as wrong."""
    undecided: int
    """Responses whose grader broke down; they count as wrong, and `tah2 grade` judges them again."""
    accuracy: Interval
    parts: dict[str, float]
    """Further verdicts of the benchmark (MBPP's `plus` tests), as accuracies."""
    mean_depth: float | None
    """Over all output tokens."""
    tokens_per_response: float
    truncated: float
    """Share of responses that ended at the token limit."""
    flops_per_token: float | None
    """All decoding FLOPs over all output tokens."""
    flops_per_response: float | None
    """Mean over problems, as in the scaling curves."""
    seconds_per_response: float | None
    graded_with: dict[str, Any] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scores:
    label: str
    tasks: list[TaskScore]
    average: Interval
    """Mean over benchmarks; problems are resampled within each."""
    flops_per_token: float | None
    """Over all responses of all benchmarks."""
    mean_depth: float | None


def score(run: GradedRun, workers: int = 1, draws: int = DRAWS, level: float = LEVEL) -> Scores:
    """Judge what is new, then score every task of `run`."""
    records = {task: run.records(task) for task in run.loaded}
    run.grade((record for each in records.values() for record in each), workers)
    kept = {task: each for task, each in records.items() if each}
    if not kept:
        raise ConfigError(f"{run.folder} holds no samples yet.")
    scored = [_task_score(run, task, each, draws, level) for task, each in kept.items()]
    accuracies = [per_problem(each, _corrects(run, each)) for each in kept.values()]
    resampling = Resampling([len(each) for each in accuracies], draws)
    joined = np.concatenate(accuracies)
    average = percentile_interval(float(resampling.weights @ joined), resampling.means(joined), level)
    everything = [record for each in kept.values() for record in each]
    return Scores(run.manifest.label, scored, average, flops_per_token(everything), mean_depth(everything))


def write_scores(run: GradedRun, scores: Scores) -> Path:
    path = run.folder / FILE_NAME
    tasks = {task.task: asdict(task) for task in scores.tasks}
    values = {**asdict(scores), "tasks": tasks, "sessions": run.manifest.sessions, "settings": run.manifest.settings}
    write_whole(path, json.dumps(_finite(values), indent=2) + "\n")
    return path


def _task_score(run: GradedRun, task: str, records: Sequence[SampleRecord], draws: int, level: float) -> TaskScore:
    loaded, settings = run.loaded[task], run.manifest.tasks[task]
    values = per_problem(records, _corrects(run, records))
    expected = settings["n"] * settings["problems"]["count"]
    costs = [record.decode_flops for record in records]
    known = [float(cost) for cost in costs if cost is not None]
    seconds = [record.seconds for record in records if record.seconds is not None]
    greedy = settings["decoding"]["temperature"] == 0
    asked = settings["problems"]["count"]
    caveats = [*loaded.provenance()["caveats"], *([] if asked == len(loaded.problems) else [f"first {asked} problems"])]
    return TaskScore(
        task=task,
        title=loaded.task.title,
        metric="avg@1 (greedy)" if greedy else f"avg@{settings['n']}",
        problems=len(values),
        responses=len(records),
        missing=expected - len(records),
        failed=sum(record.finish_reason == ERROR for record in records),
        undecided=sum(undecided(run.grade_of(record)) for record in records),
        accuracy=mean_interval(values, draws=draws, level=level),
        parts=_parts(run, records),
        mean_depth=mean_depth(records),
        tokens_per_response=float(np.mean([length(record) for record in records])),
        truncated=float(np.mean([record.finish_reason == LENGTH for record in records])),
        flops_per_token=flops_per_token(records),
        flops_per_response=float(per_problem(records, known).mean()) if len(known) == len(records) else None,
        seconds_per_response=float(np.mean(seconds)) if seconds else None,
        graded_with=run.judges[task],
        caveats=tuple(caveats),
    )


def _corrects(run: GradedRun, records: Sequence[SampleRecord]) -> list[float]:
    return [float(run.grade_of(record).correct) for record in records]


def _parts(run: GradedRun, records: Sequence[SampleRecord]) -> dict[str, float]:
    grades = [run.grade_of(record) for record in records]
    names = dict.fromkeys(name for grade in grades for name in grade.parts)
    return {
        name: float(per_problem(records, [float(grade.parts.get(name, 0.0)) for grade in grades]).mean())
        for name in names
    }


def per_problem(records: Sequence[SampleRecord], values: Sequence[float]) -> Floats:
    """The mean of `values` (one per record) over the repeats of each problem, problems in order of the records."""
    places = {problem: place for place, problem in enumerate(dict.fromkeys(record.problem for record in records))}
    index = np.array([places[record.problem] for record in records])
    sums = np.bincount(index, weights=np.asarray(values, dtype=np.float64), minlength=len(places))
    return np.asarray(sums / np.bincount(index, minlength=len(places)))


def length(record: SampleRecord) -> int:
    """Output tokens; where a server told no ids, the number that it counted."""
    return len(record.token_ids) or int(record.extra.get("completion_tokens") or 0)


def mean_depth(records: Sequence[SampleRecord]) -> float | None:
    depths = [depth for record in records for depth in record.depths]
    return float(np.mean(depths)) if depths else None


def flops_per_token(records: Sequence[SampleRecord]) -> float | None:
    tokens = sum(length(record) for record in records)
    costs = [record.decode_flops for record in records if record.finish_reason != ERROR]
    if not tokens or any(cost is None for cost in costs):
        return None
    return sum(cost for cost in costs if cost is not None) / tokens


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
