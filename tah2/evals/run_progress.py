"""What people see while samples come in: a bar, or now and then a line where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tah2.evals.records import SampleRecord

LINE_EVERY_SECONDS = 30.0


class RunProgress:
    """Counts samples; the rate is that of this session, so a resumed run's is not flattered."""

    def __init__(self, total: int, done: int, console: Console | None = None, unit: str = "samples") -> None:
        self.console = console or Console(stderr=True)
        self.total, self.done, self.unit = total, done, unit
        self.made = self.tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(unit, total=total, completed=done, state="")

    def __enter__(self) -> RunProgress:
        if self.done:
            self.console.print(f"{self.done:,} of {self.total:,} {self.unit} are there already")
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self.made and not self.console.is_terminal:
            self._line()

    def add(self, record: SampleRecord) -> None:
        self.step(len(record.token_ids))

    def step(self, tokens: int = 0) -> None:
        self.made += 1
        self.tokens += tokens
        self._bar.update(self._task, advance=1, state=self.state())
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last_line >= LINE_EVERY_SECONDS:
            self._last_line = now
            self._line()

    def state(self) -> str:
        """`3.20/s  410 tokens/s  ETA 4:12`"""
        seconds = max(time.monotonic() - self._started, 1e-9)
        left = (self.total - self.done - self.made) * seconds / max(self.made, 1)
        speed = f"  {self.tokens / seconds:,.0f} tokens/s" if self.tokens else ""
        return f"{self.made / seconds:.2f}/s{speed}  ETA {duration(left)}"

    def _line(self) -> None:
        self.console.print(f"{self.done + self.made:,}/{self.total:,} {self.unit}  {self.state()}", highlight=False)


def duration(seconds: float) -> str:
    """`4:12` or `1:04:12`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
