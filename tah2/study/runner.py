"""Carries out a plan: what is done is passed over, the rest runs one by one or in a pool of processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tah2.config.strict import ConfigError, plain
from tah2.study.estimate import Cost, estimate
from tah2.study.layout import STUDY
from tah2.study.plan import ALONE, STAGES, Plan, Task
from tah2.study.shop import NotReady, Shop
from tah2.study.stages.training import Interrupted, describe_unit
from tah2.train.summary import write_summary


class Screen(Protocol):
    """Who watches."""

    def start(self, tasks: int, seconds: float) -> None: ...
    def begin(self, task: Task) -> None: ...
    def share(self, task: Task, done: float) -> None: ...
    def end(self, task: Task, seconds: float, cached: bool) -> None: ...
    def close(self) -> None: ...


@dataclass
class Run:
    """One carrying out of a plan; `stages` (all by default) are the ones that may run."""

    shop: Shop
    screen: Screen
    jobs: int = 1
    stages: frozenset[str] = frozenset(STAGES)
    costs: dict[str, Cost] = field(default_factory=dict)

    def carry_out(self) -> None:
        plan = self.shop.plan
        begin_study(self.shop)
        tasks = [task for task in plan.tasks.values() if task.stage in self.stages]
        self.costs = estimate(plan)
        self.screen.start(len(tasks), sum(self.costs[task.id].seconds for task in tasks))
        try:
            if self.jobs == 1:
                for task in tasks:
                    self._do(task)
            else:
                self._do_in_pool(tasks)
        finally:
            self.screen.close()

    def _do(self, task: Task) -> None:
        key = self._open(task)
        if key is not None:
            started = time.monotonic()
            self.shop.run(task, key, lambda share: self.screen.share(task, share))
            self.screen.end(task, time.monotonic() - started, cached=False)

    def _open(self, task: Task) -> str | None:
        """The key of a task that has to run; None where it is done."""
        key = self.shop.key(task)
        if self.shop.ledger.is_done(task, key):
            if task.stage == "validate":
                describe_unit(self.shop, self.shop.plan.units[task.subject])  # its title may be another by now
            self.screen.end(task, 0.0, cached=True)
            return None
        self.screen.begin(task)
        return key

    def _do_in_pool(self, tasks: Iterable[Task]) -> None:
        """Tasks whose needs are done run in worker processes of one thread each."""
        waiting = {task.id: task for task in tasks}
        running: dict[Future[float], Task] = {}
        spawn = multiprocessing.get_context("spawn")
        shares = spawn.Queue()
        with ProcessPoolExecutor(self.jobs, spawn, initializer=_begin_worker, initargs=(shares,)) as pool:
            try:
                while waiting or running:
                    for task in self._ready(waiting, running):
                        if len(running) >= self.jobs:
                            break
                        del waiting[task.id]
                        key = self._open(task)
                        if key is not None:
                            running[pool.submit(_work, self.shop, task, key)] = task
                    if running:
                        self._await(running, shares)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _await(self, running: dict[Future[float], Task], shares: multiprocessing.Queue[tuple[str, float]]) -> None:
        """Until something has finished; meanwhile what the workers tell is shown."""
        done: set[Future[float]] = set()
        while not done:
            done, _ = wait(running, timeout=0.25, return_when=FIRST_COMPLETED)
            told = {task.id: task for task in running.values()}
            while not shares.empty():
                name, share = shares.get()
                if name in told:
                    self.screen.share(told[name], share)
        for future in done:
            self.screen.end(running.pop(future), future.result(), cached=False)

    def _ready(self, waiting: dict[str, Task], running: dict[Future[float], Task]) -> list[Task]:
        """What can begin now; a stage that runs alone begins when nothing else is left to do before it."""
        if any(task.stage in ALONE for task in running.values()):
            return []
        busy = {*waiting, *(task.id for task in running.values())}
        free = [task for task in waiting.values() if not busy.intersection(task.needs)]
        together = [task for task in free if task.stage not in ALONE]
        return together if together or running else free[:1]


_shares: multiprocessing.Queue[tuple[str, float]] | None = None
"""In a worker: where it tells its progress."""


def _begin_worker(shares: multiprocessing.Queue[tuple[str, float]]) -> None:
    global _shares
    _shares = shares
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _end_with_the_study() -> None:
    """A worker whose study was killed leaves too; what it was doing resumes from its last checkpoint."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(shop: Shop, task: Task, key: str) -> float:
    assert _shares is not None
    started, tell = time.monotonic(), _shares.put
    shop.run(task, key, lambda share: tell((task.id, share)))
    return time.monotonic() - started


def begin_study(shop: Shop) -> None:
    """Write `study.json`, through which the results are read."""
    shop.root.mkdir(parents=True, exist_ok=True)
    asked = {"command": shop.command, "study": plain(shop.plan.study), "units": list(shop.plan.units)}
    write_summary(shop.root / STUDY, asked)


def state_of(shop: Shop, task: Task) -> str:
    """`done`, `to do`, or `waits` where its inputs are not there yet."""
    try:
        key = shop.key(task)
    except (NotReady, FileNotFoundError):
        return "waits"
    return "done" if shop.ledger.is_done(task, key) else "to do"


def chosen_stages(names: Iterable[str]) -> frozenset[str]:
    """The stages called `names`; all where there are none."""
    from tah2.config.strict import suggestion

    names = tuple(names)
    for name in names:
        if name not in STAGES:
            raise ConfigError(f"There is no stage {name!r}{suggestion(name, STAGES)}.")
    return frozenset(names or STAGES)


def run_study(
    plan: Plan, out: Path, screen: Screen, *, jobs: int = 1, stages: Iterable[str] = (), command: str = "tah2 study"
) -> Shop:
    """Carry out `plan` in the folder `out`; what an earlier run finished there is kept."""
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, not {jobs}.")
    shop = Shop(out, plan, command)
    Run(shop, screen, jobs, chosen_stages(stages)).carry_out()
    return shop


__all__ = ["Interrupted", "Run", "Screen", "begin_study", "chosen_stages", "run_study", "state_of"]
