"""What `tah2 distill` shows while it runs: answers done, tokens a second, and when it will be over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tah2.distill.report import DistillReport
from tah2.distill.run import Watch


class ProgressWatch(Watch):
    """A bar on stderr; use it in `with`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task("reading prompts", total=None, rate="")
        self._tokens, self._started = 0, time.monotonic()

    def __enter__(self) -> ProgressWatch:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def planned(self, report: DistillReport, total: int, answered: int) -> None:
        read, left_out = report.read.total(), report.dropped.total()
        there = f"; {answered:,} of {total:,} answers are there already" if answered else ""
        self.console.print(f"{read:,} prompts read, {read - left_out:,} to ask{there}", highlight=False)
        self._started = time.monotonic()
        self._bar.reset(self._task, description="asking", total=total, completed=answered)

    def answered(self, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        self._bar.update(self._task, advance=1, rate=f"{rate:,.0f} tokens/s")

    def stage(self, name: str) -> None:
        self._bar.update(self._task, description=name, rate="")


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """A line on stderr that counts, for work whose size is not known; yields what to tell the count."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def watch(count: int) -> None:
            if count % 64 == 0:
                bar.update(task, completed=count)

        yield watch
