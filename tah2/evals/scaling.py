"""Test-time scaling of graded runs: every response judged again at every output-token cutoff.

`RunCurves` holds what a comparison needs of one run, as arrays over problems; nothing here prints or draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from tah2.config.strict import ConfigError
from tah2.evals.consensus import EXACT_UP_TO, Ballot, consensus_exact, consensus_sampled
from tah2.evals.curves import Curve
from tah2.evals.cutoffs import TextOf, cut
from tah2.evals.flops import FlopsModel
from tah2.evals.grade_run import GradedRun
from tah2.evals.manifest import RunManifest
from tah2.evals.records import SampleRecord
from tah2.evals.run_plan import response_text
from tah2.evals.score import length, mean_depth, per_problem
from tah2.evals.statistics import Floats
from tah2.evals.tasks import task_named

PAPER_CUTOFFS = tuple(k * 1024 for k in (4, 6, 8, 12, 16, 20, 24, 28, 32))
VOTE_DRAWS = 2000


@dataclass(frozen=True)
class TaskCurve:
    """One benchmark of one run at every cutoff; C columns in the order of `cutoffs`."""

    task: str
    title: str
    problems: tuple[str, ...]
    cutoffs: tuple[int, ...]
    accuracy: Floats
    """`[P, C]`: mean over the responses to each problem."""
    flops: Floats | None
    seconds: Floats | None
    """`[P, C]`: mean per response; None where any is unknown."""
    tokens: Floats
    """`[C]`: output tokens per response."""
    depth: Floats
    """`[C]`: mean over all output tokens; not a number where unknown."""
    ballots: tuple[Ballot, ...]
    """Votes of the whole responses to each problem; empty where answers cannot be compared."""


@dataclass(frozen=True)
class RunCurves:
    label: str
    loop: str
    """Kind of loop, or "unknown"."""
    trained_ceiling: int | None
    ceiling: int | None
    """Depth ceilings of the checkpoint, and of this run."""
    tasks: tuple[TaskCurve, ...]

    def only(self, names: Sequence[str]) -> RunCurves:
        by_name = {curve.task: curve for curve in self.tasks}
        return RunCurves(
            self.label, self.loop, self.trained_ceiling, self.ceiling, tuple(by_name[name] for name in names)
        )

    @property
    def cutoffs(self) -> tuple[int, ...]:
        return self.tasks[0].cutoffs

    def against_flops(self) -> Curve | None:
        """Accuracy against decoding FLOPs per response, over all benchmarks; None where FLOPs are unknown."""
        return _joined([(curve.accuracy, curve.flops) for curve in self.tasks])

    def against_seconds(self) -> Curve | None:
        return _joined([(curve.accuracy, curve.seconds) for curve in self.tasks])


def _joined(parts: Sequence[tuple[Floats, Floats | None]]) -> Curve | None:
    costs = [cost for _, cost in parts if cost is not None]
    if len(costs) != len(parts):
        return None
    accuracies = [accuracy for accuracy, _ in parts]
    return Curve(np.concatenate(accuracies), np.concatenate(costs), tuple(len(each) for each in accuracies))


def default_cutoffs(limit: int) -> tuple[int, ...]:
    """The paper's grid up to `limit`; for shorter runs the same shares of it."""
    if limit > PAPER_CUTOFFS[0]:
        return tuple(sorted({*(each for each in PAPER_CUTOFFS if each <= limit), limit}))
    return tuple(sorted({max(1, round(limit * each / PAPER_CUTOFFS[-1])) for each in PAPER_CUTOFFS}))


def cuttable_tasks(folder: Path) -> list[str]:
    """The benchmarks of a run whose responses can be cut: those that are no conversations."""
    names = [name for name in RunManifest.read(folder).tasks if not task_named(name).multi_turn]
    if not names:
        raise ConfigError(f"{folder} holds multi-turn tasks alone, whose episodes cannot be cut afterwards.")
    return names


def token_limit(run: GradedRun) -> int:
    """The lowest output limit among the run's tasks."""
    return int(min(run.manifest.tasks[name]["decoding"]["max_tokens"] for name in run.loaded))


def run_curves(run: GradedRun, cutoffs: Sequence[int], tokenizer: object = None, workers: int = 1) -> RunCurves:
    """Judge `run` at every cutoff. `tokenizer` None: only responses that no cutoff shortens can be judged."""
    manifest = run.manifest
    loop, backbone = manifest.loop, manifest.backbone
    ceiling = manifest.model.get("max_depth")
    flops = None if loop is None or backbone is None else FlopsModel(backbone, loop, ceiling)
    curves = [_task_curve(run, name, tuple(cutoffs), tokenizer, flops, workers) for name in run.loaded]
    kind = "unknown" if loop is None else loop.kind
    return RunCurves(manifest.label, kind, None if loop is None else loop.max_depth, ceiling, tuple(curves))


def _task_curve(
    run: GradedRun, task: str, cutoffs: tuple[int, ...], tokenizer: object, flops: FlopsModel | None, workers: int
) -> TaskCurve:
    whole = run.records(task)
    if not whole:
        raise ConfigError(f"{run.folder} holds no samples of {task!r} yet.")
    run.grade(whole, workers)
    text_of = _text_of(run, task, tokenizer)
    columns: list[tuple[Floats, Floats | None, Floats | None, float, float]] = []
    for limit in cutoffs:
        records = [cut(record, limit, text_of, flops) for record in whole]
        run.grade(records, workers, f"responses at {limit:,} tokens")
        correct = [float(run.grade_of(record).correct) for record in records]
        depth = mean_depth(records)
        columns.append(
            (
                per_problem(records, correct),
                _known(records, [record.decode_flops for record in records]),
                _known(records, [record.seconds for record in records]),
                float(np.mean([length(record) for record in records])),
                float("nan") if depth is None else depth,
            )
        )
    accuracy, cost, seconds, tokens, depths = zip(*columns, strict=True)
    return TaskCurve(
        task=task,
        title=run.loaded[task].task.title,
        problems=tuple(dict.fromkeys(record.problem for record in whole)),
        cutoffs=cutoffs,
        accuracy=np.stack(accuracy, 1),
        flops=_stacked(cost),
        seconds=_stacked(seconds),
        tokens=np.array(tokens),
        depth=np.array(depths),
        ballots=_ballots(run, whole),
    )


def _text_of(run: GradedRun, task: str, tokenizer: object) -> TextOf:
    chat = run.manifest.settings["prompt"]["chat"]
    stops = () if chat else run.loaded[task].task.text_stop

    def text_of(ids: Sequence[int]) -> str:
        if tokenizer is None:
            raise ConfigError("Cutting responses needs the run's tokenizer: name its folder with '--tokenizer'.")
        return response_text(tokenizer, ids, stops)

    return text_of


def _known(records: Sequence[SampleRecord], values: Sequence[float | None]) -> Floats | None:
    known = [float(value) for value in values if value is not None]
    return per_problem(records, known) if len(known) == len(values) else None


def _stacked(columns: Iterable[Floats | None]) -> Floats | None:
    columns = list(columns)
    kept = [column for column in columns if column is not None]
    return np.stack(kept, 1) if len(kept) == len(columns) else None


def _ballots(run: GradedRun, records: Sequence[SampleRecord]) -> tuple[Ballot, ...]:
    ballots = []
    for _, group in groupby(records, key=lambda record: record.problem):
        grades = [run.grade_of(record) for record in group]
        ballots.append(Ballot.of([grade.answer for grade in grades], [grade.correct for grade in grades]))
    return tuple(ballots) if any(ballot.counts for ballot in ballots) else ()


def votes(ballots: Sequence[Ballot], most: int | None = None, draws: int | None = None) -> Floats:
    """`[P, n]`: expected credit of majority votes of 1, 2, ... responses, n up to what every problem has.

    `draws` None: exact, where the number of responses allows it.
    """
    n = min(ballot.responses for ballot in ballots)
    n = n if most is None else min(n, most)
    exact = draws is None and all(ballot.responses <= EXACT_UP_TO for ballot in ballots)
    rows = [
        consensus_exact(ballot) if exact else consensus_sampled(ballot, draws or VOTE_DRAWS, seed)
        for seed, ballot in enumerate(ballots)
    ]
    return np.stack([row[:n] for row in rows])
