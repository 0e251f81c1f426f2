"""The table of graders, and the two functions that use it."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tah2.config.strict import ConfigError, suggestion
from tah2.evals.graders.choice import CHOICE
from tah2.evals.graders.contest import LIVECODEBENCH
from tah2.evals.graders.functions import HUMANEVAL, MBPP
from tah2.evals.graders.grader import Grader, Request, Response, answered, stopped
from tah2.evals.graders.mathematics import MATH
from tah2.evals.graders.tools import BFCL_V3, BFCL_V4
from tah2.evals.sandbox import Sandbox
from tah2.evals.task import Grade, Problem, Task

GRADERS: dict[str, Grader] = {}
MOST_WORKERS = 64
EACH = "tah2.evals.graders.inside.each:run"

Item = tuple[Problem, Response]
OnGrade = Callable[[int, Grade], None]
"""Called with the place of an item and its grade, as soon as that is known, in any order."""


def register(grader: Grader) -> Grader:
    """Add `grader` under its name, which must be free."""
    if grader.name in GRADERS:
        raise ConfigError(f"A grader named {grader.name!r} is registered already; choose another name.")
    GRADERS[grader.name] = grader
    return grader


for _grader in (MATH, CHOICE, HUMANEVAL, MBPP, LIVECODEBENCH, BFCL_V3, BFCL_V4):
    register(_grader)


def grader_of(task: Task) -> Grader:
    if task.grader not in GRADERS:
        raise ConfigError(f"Task {task.name!r} asks for grader {task.grader!r}{suggestion(task.grader, GRADERS)}.")
    return GRADERS[task.grader]


def packages_of(task: Task) -> dict[str, str]:
    """Package -> version behind every score of `task`; empty where the rule is tah2's own."""
    return grader_of(task).versions()


def grade(task: Task, problem: Problem, response: Response) -> Grade:
    """One response; for many, `grade_many` starts its workers once."""
    return grade_many(task, [(problem, response)])[0]


def grade_many(task: Task, items: Sequence[Item], workers: int = 1, on_grade: OnGrade | None = None) -> list[Grade]:
    """The grades of `items`, in order. Whatever a response makes a grader do, the others are graded."""
    grader = grader_of(task)
    grades: dict[int, Grade] = {}

    def settle(place: int, verdict: Grade) -> None:
        grades[place] = verdict
        if on_grade is not None:
            on_grade(place, verdict)

    if grader.here is not None:
        for place, (problem, response) in enumerate(items):
            settle(place, grader.here(problem, answered(response)))
        return [grades[place] for place in range(len(items))]

    asked: list[tuple[int, Request]] = []
    for place, (problem, response) in enumerate(items):
        request = _called(grader.request)(problem, answered(response))
        if isinstance(request, Grade):
            settle(place, request)
        else:
            asked.append((place, request))
    batches = [asked[start : start + grader.batch] for start in range(0, len(asked), grader.batch)]
    sandbox = sandbox_for(grader.name)
    with ThreadPoolExecutor(min(workers, MOST_WORKERS)) as pool:
        for settled in pool.map(lambda batch: list(_judged(grader, sandbox, items, batch)), batches):
            for place, verdict in settled:
                settle(place, verdict)
    return [grades[place] for place in range(len(items))]


@functools.cache
def sandbox_for(grader: str) -> Sandbox:
    """Workers that hold the grader's libraries, kept to the end of this process; as many run as are used at once.

    The first complaint about a missing library comes from here.
    """
    found = GRADERS[grader]
    sandbox = Sandbox(MOST_WORKERS, [*found.preload, EACH.split(":")[0]], found.path())
    atexit.register(sandbox.close)
    return sandbox


def _judged(
    grader: Grader, sandbox: Sandbox, items: Sequence[Item], batch: list[tuple[int, Request]]
) -> Iterator[tuple[int, Grade]]:
    """A batch in one room; if that comes to no end, every request of it in a room of its own."""
    requests = [request for _, request in batch]
    outcome = sandbox.call(EACH, {"check": grader.harness, "items": requests}, grader.limits(requests))
    if outcome.ending == "done":
        for (place, _), reply in zip(batch, outcome.reply, strict=True):
            yield place, _called(grader.verdict)(items[place][0], reply)
    elif len(batch) == 1:
        yield batch[0][0], stopped(outcome)
    else:
        for entry in batch:
            yield from _judged(grader, sandbox, items, [entry])


def _called(function: Callable[..., Any] | None) -> Callable[..., Any]:
    """A grader with a harness has both of its functions."""
    assert function is not None
    return function
