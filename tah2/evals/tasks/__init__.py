"""The table of tasks. A new one is a `Task` and a `register(...)`; `docs/add-a-task.md` shows it on a page."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from tah2.config.strict import ConfigError, suggestion
from tah2.evals.task import Task
from tah2.evals.tasks.choice import TASKS as CHOICE
from tah2.evals.tasks.code import TASKS as CODE
from tah2.evals.tasks.math import TASKS as MATH
from tah2.evals.tasks.tools import TASKS as TOOLS

TASKS: dict[str, Task] = {}
TASKS_VARIABLE = "TAH2_TASKS"
"""Python files that register tasks and graders of one's own, separated as in PATH."""


def register(task: Task) -> Task:
    """Add `task` under its name, which must be free."""
    if task.name in TASKS:
        raise ConfigError(f"A task named {task.name!r} is registered already; choose another name.")
    TASKS[task.name] = task
    return task


def task_named(name: str) -> Task:
    if name not in TASKS:
        raise ConfigError(f"Unknown task {name!r}{suggestion(name, TASKS)}.")
    return TASKS[name]


for _task in (*MATH, *CHOICE, *CODE, *TOOLS):
    register(_task)


def import_extensions(files: str) -> None:
    """Import each of `files`, from its folder, so that sandboxed workers find its module under the same name."""
    for name in filter(None, files.split(os.pathsep)):
        path = Path(name).absolute()
        if not path.is_file():
            raise ConfigError(f"{TASKS_VARIABLE} names {name}, which is no file.")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        importlib.import_module(path.stem)


import_extensions(os.environ.get(TASKS_VARIABLE, ""))
