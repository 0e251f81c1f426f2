"""The real benchmark files, where this checkout has them beside it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tah2.evals.task import Problem
from tah2.evals.tasks import task_named

FOLDER = Path(os.environ.get("TAH2_BENCHMARKS") or Path(__file__).resolve().parents[2].parent / "shared" / "benchmarks")


@functools.cache
def problems(name: str) -> list[Problem]:
    task = task_named(name)
    if not (FOLDER / task.source.file).is_file():
        pytest.skip(f"{task.source.file} is not here")
    return task.problems(FOLDER)
