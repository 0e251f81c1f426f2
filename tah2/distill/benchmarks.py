"""The problems of the evaluation tasks as texts to compare with: questions alone, neither prompts around them nor
answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.distill.contamination import BOILERPLATE, Benchmarks, ProblemText
from tah2.evals.sources import data_folder
from tah2.evals.task import Task
from tah2.evals.tasks import TASKS, task_named

ALL = "all"
FIELDS = ("problem", "problem_v1", "question", "text")
"""Where the rows of the tasks hold what is asked, in words alone where they have that."""
PROMPT = "prompt"
"""Read where a row has none of these."""


@dataclass(frozen=True)
class Compared:
    """An index, and what is in it."""

    index: Benchmarks
    problems: Mapping[str, int]
    """Number of problems by benchmark."""
    missing: tuple[str, ...]
    """Benchmarks that "all" would name but that the folder does not have."""
    secret: frozenset[str]
    """Benchmarks whose problems must not stand in plain text anywhere: of their hits, name the problem alone."""


def open_benchmarks(
    names: Sequence[str] = (ALL,), data_dir: Path | None = None, run: int = 13, boilerplate: int = BOILERPLATE
) -> Compared:
    """Load the named benchmarks; "all" means those of the folder, or, without a folder, every one of the hub's."""
    folder = data_folder(data_dir)
    tasks = [task_named(name) for name in names if name != ALL]
    missing: tuple[str, ...] = ()
    if ALL in names:
        tasks += (here := [task for task in TASKS.values() if _is_there(task, folder)])
        missing = tuple(name for name, task in TASKS.items() if task not in here)
    if not tasks:
        raise ConfigError(f"There is no benchmark in {folder}: name the folder of their files with 'data_dir'.")
    problems: dict[str, int] = {}
    texts: list[ProblemText] = []
    for task in {task.name: task for task in tasks}.values():
        rows = task.load(folder).rows
        problems[task.name] = len(rows)
        for row in rows:
            texts += problem_texts(task, row)
    secret = frozenset(task.name for task in tasks if task.source.password is not None)
    return Compared(Benchmarks(texts, run, boilerplate), problems, missing, secret)


def _is_there(task: Task, folder: Path | None) -> bool:
    return task.source.hub is not None if folder is None else (folder / task.source.file).is_file()


def problem_texts(task: Task, row: Mapping[str, Any]) -> Iterator[ProblemText]:
    """Every text in which the row asks something."""
    for name in [name for name in FIELDS if name in row] or [PROMPT]:
        value = row.get(name)
        if isinstance(value, str):
            yield ProblemText(task.name, str(row["id"]), value)
        elif value is not None:
            for text in _contents(value):
                yield ProblemText(task.name, str(row["id"]), text, whole=False)


def _contents(value: Any) -> Iterator[str]:
    """The messages' texts in turns of messages."""
    if isinstance(value, Mapping):
        if isinstance(value.get("content"), str):
            yield value["content"]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for entry in value:
            yield from _contents(entry)
