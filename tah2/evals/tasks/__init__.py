"""The table of tasks. A new one is a `Task` and a `register(...)`; `docs/add-a-task.md` shows it on a page."""

from __future__ import annotations

from tah2.config.strict import ConfigError, suggestion
from tah2.evals.task import Task
from tah2.evals.tasks.choice import TASKS as CHOICE
from tah2.evals.tasks.code import TASKS as CODE
from tah2.evals.tasks.math import TASKS as MATH
from tah2.evals.tasks.tools import TASKS as TOOLS

TASKS: dict[str, Task] = {}


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
