"""Screens for tests: one that remembers, one that kills its own process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tah2.study.plan import Task, plan_study
from tah2.study.runner import _begin_worker, run_study
from tests.study.mini import mini

UNITS = ("base", "train", "validate", "generate", "grade")
"""Stages of units; what follows reads their files alone."""
SMALL: dict[str, Any] = {"bases": {"tiny": {"seeds": [0]}}, "generate": {"problems": 3}}


@dataclass
class Remembered:
    ran: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)

    def start(self, tasks: int, seconds: float) -> None:
        assert seconds > 0

    def begin(self, task: Task) -> None: ...

    def share(self, task: Task, done: float) -> None:
        assert 0 <= done <= 1

    def end(self, task: Task, seconds: float, cached: bool) -> None:
        (self.cached if cached else self.ran).append(task.id)

    def close(self) -> None: ...


@dataclass
class Killer(Remembered):
    """Kills the process when the stage `at` begins to show progress (its second sign of it)."""

    at: str = ""
    signs: int = 0

    def share(self, task: Task, done: float) -> None:
        if task.stage == self.at:
            self.signs += 1
            if self.signs == 2:
                os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(folder: Path, stage: str) -> None:
    run_study(plan_study(mini(folder, SMALL)), folder / "out", Killer(at=stage), stages=UNITS)


def hold_a_worker(told: Connection) -> None:
    """A study in small: one busy worker in a pool."""
    spawn = multiprocessing.get_context("spawn")
    shares: Any = spawn.Queue()
    with ProcessPoolExecutor(1, spawn, initializer=_begin_worker, initargs=(shares,)) as pool:
        told.send(pool.submit(os.getpid).result())
        pool.submit(time.sleep, 600).result()
