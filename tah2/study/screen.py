"""What people see while a study runs: one bar for the whole with time left, or a line per stage without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tah2.study.estimate import Cost
from tah2.study.plan import Task
from tah2.train.callbacks.progress import duration


class StudyScreen:
    """Progress is counted in estimated seconds; the time left is theirs, at the pace of the stages that are done."""

    def __init__(
        self,
        costs: Mapping[str, Cost],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        jobs: int = 1,
    ) -> None:
        self.jobs = jobs
        self.costs, self.console, self._clock = costs, console or Console(stderr=True, soft_wrap=True), clock
        self._bar: Progress | None = None
        self._bar_task = TaskID(0)
        self._tasks = self._done = self._cached = 0
        self._whole = self._estimated = self._spent = self._skipped = 0.0
        self._shares: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    def start(self, tasks: int, seconds: float) -> None:
        self._tasks, self._whole = tasks, max(seconds, 1e-9)
        if self.console.is_terminal:
            columns = (
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[state]}", markup=False),
            )
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self._bar_task = self._bar.add_task("study", total=self._whole, state="")
            self._bar.start()

    def begin(self, task: Task) -> None:
        self._begun[task.id] = self._clock()
        self._show()

    def share(self, task: Task, done: float) -> None:
        self._shares[task.id] = done
        self._show()

    def end(self, task: Task, seconds: float, cached: bool) -> None:
        self._shares.pop(task.id, None)
        self._begun.pop(task.id, None)
        self._done += 1
        cost = self.costs[task.id].seconds
        if cached:
            self._cached += 1
            self._skipped += cost
        else:
            self._estimated += cost
            self._spent += seconds
            self._say(f"[{self._done}/{self._tasks}] {task.id}  {seconds:.1f} s{self._time_left()}")
        self._show()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        passed_over = f", {self._cached} of them made before" if self._cached else ""
        self._say(f"{self._done} of {self._tasks} stages done{passed_over}")

    @property
    def pace(self) -> float:
        """Real seconds per estimated one, among what has run."""
        return self._spent / self._estimated if self._estimated > 0 and self._spent > 0 else 1.0

    def seconds_left(self) -> float:
        """At the pace so far, `jobs` stages at a time."""
        under_way = sum(self.costs[name].seconds * share for name, share in self._shares.items())
        return max(0.0, self._whole - self._estimated - self._skipped - under_way) * self.pace / self.jobs

    def _time_left(self) -> str:
        return f"  ETA {duration(self.seconds_left())}" if self._done < self._tasks else ""

    def _show(self) -> None:
        if self._bar is None:
            return
        under_way = sum(self.costs[name].seconds * share for name, share in self._shares.items())
        now = "  ".join(sorted(self._begun))
        state = f"{self._done}/{self._tasks}  {now}{self._time_left()}"
        self._bar.update(self._bar_task, completed=self._estimated + self._skipped + under_way, state=state)

    def _say(self, text: str) -> None:
        self.console.print(Text(text))
