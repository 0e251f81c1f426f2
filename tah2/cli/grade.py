"""`tah2 grade`: judge the samples of a run and print its scores."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tah2.evals.score import Scores, TaskScore

DESCRIPTION = """\
Judge the samples of a run and print its scores.

  tah2 grade runs/eval-m2
  tah2 grade runs/quick --data-dir BENCHMARKS --workers 4

DIR receives grades.jsonl (one verdict per response) and scores.json. The command may be repeated: responses that have a
verdict of the same graders keep it, new ones are judged. Accuracy is the mean over problems of the mean over
responses, with a bootstrap interval over problems. Model-written code runs in a sandbox.
"""

WIDTH = 120


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tah2 grade", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="DIR", help="a folder that 'tah2 eval' has written")
    parser.add_argument("--tasks", default="", metavar="A,B", help="only these benchmarks of the run")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the run's problems came from; else the hub")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="responses judged at a time (default 2)")
    parser.add_argument("--level", type=float, default=0.95, metavar="P", help="of the intervals (default 0.95)")
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1 or not 0 < arguments.level < 1:
        raise ValueError("'--workers' must be at least 1, and '--level' between 0 and 1.")

    from tah2.evals.grade_run import GradedRun
    from tah2.evals.run import locked
    from tah2.evals.score import score, write_scores

    tasks = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    run = GradedRun(arguments.run, arguments.data_dir, tasks)
    with locked(run.folder, "grade"):
        scores = score(run, arguments.workers, level=arguments.level)
        path = write_scores(run, scores)
    if arguments.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        show(scores)
    return 0


def show(scores: Scores) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("task", "metric", title=scores.label, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("problems", "score %", "interval", "depth", "tokens", "cut", "GFLOPs\n/token", "TFLOPs\n/response"):
        table.add_column(name, justify="right")
    for task in scores.tasks:
        table.add_row(*_row(task))
    if len(scores.tasks) > 1:
        low, high = scores.average.low, scores.average.high
        figures = [number(scores.average.estimate, 100), f"{low * 100:.1f}–{high * 100:.1f}"]
        figures += [number(scores.mean_depth, 1, 2), "", "", number(scores.flops_per_token, 1e-9, 3), ""]
        table.add_section()
        table.add_row("average", "", "", *figures)
    console = console_for_tables()
    console.print(table)
    for task in scores.tasks:
        for line in _remarks(task):
            console.print(f"  {task.task}: {line}", highlight=False, markup=False)


def console_for_tables() -> Any:
    """Standard output; as wide as tables like to be where nobody watches."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=WIDTH)


def _row(task: TaskScore) -> list[str]:
    return [
        task.task,
        task.metric,
        f"{task.problems:,}",
        number(task.accuracy.estimate, 100),
        f"{task.accuracy.low * 100:.1f}–{task.accuracy.high * 100:.1f}",
        number(task.mean_depth, 1, 2),
        f"{task.tokens_per_response:,.0f}",
        f"{task.truncated:.0%}",
        number(task.flops_per_token, 1e-9, 3),
        number(task.flops_per_response, 1e-12, 3),
    ]


def _remarks(task: TaskScore) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in task.graded_with.get("packages", {}).items())
    parts = [f"{name} {value:.1%}" for name, value in task.parts.items()]
    told = [f"also {', '.join(parts)}"] if parts else []
    told += [f"graded with {versions}"] if versions else []
    told += [f"{task.missing:,} responses are missing: run 'tah2 eval' again"] if task.missing else []
    told += [f"{task.failed:,} responses failed and count as wrong"] if task.failed else []
    told += [f"{task.undecided:,} responses could not be judged: the grader failed"] if task.undecided else []
    return [*told, *task.caveats]


def number(value: Any, factor: float, digits: int = 1) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"
