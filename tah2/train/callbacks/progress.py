"""What people at the terminal see: a bar, or now and then a line where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tah2.train.callbacks.base import Callback, Level, Metrics, RunInfo

STYLES: dict[Level, str] = {"info": "", "warning": "yellow", "error": "bold red"}
LINE_EVERY_SECONDS = 30.0


class ProgressBar(Callback):
    shows_messages = True

    def __init__(
        self,
        console: Console | None = None,
        line_every_seconds: float = LINE_EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(stderr=True, soft_wrap=True)
        self._line_every, self._clock = line_every_seconds, clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._total: int | None = None
        self._first_step, self._started, self._last_line = 0, 0.0, -float("inf")

    def on_start(self, run: RunInfo) -> None:
        self._total, self._first_step, self._started = run.total_steps, run.start_step, self._clock()
        begun = f", resumed after step {run.start_step:,}" if run.start_step else ""
        self._say(f"{run.name}: {_steps(run.total_steps)} to {run.folder}{begun}")
        if self.console.is_terminal:
            self._bar = _bar(self.console)
            self._task = self._bar.add_task("train", total=run.total_steps, completed=run.start_step, state="")
            self._bar.start()

    def on_step(self, step: int, metrics: Metrics) -> None:
        state = describe(metrics, self._seconds_left(step))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, state=state)
            return
        now = self._clock()
        if now - self._last_line >= self._line_every or step == self._total:
            self._last_line = now
            of = f"/{self._total:,}" if self._total else ""
            self._say(f"step {step:,}{of}  {state}")

    def on_validation(self, step: int, metrics: Metrics) -> None:
        depths = [f"depth {m} {metrics[name]:.4f}" for m, name in _depth_losses(metrics)]
        parts = f" ({', '.join(depths)})" if len(depths) > 1 else ""
        self._say(f"validation at step {step:,}: {describe(metrics, None)}{parts}")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._say(f"checkpoint at step {step:,}: {path}")

    def on_message(self, level: Level, text: str) -> None:
        self._say(text if level == "info" else f"{level}: {text}", STYLES[level])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._say(f"{summary.get('status', 'finished')} after {duration(self._clock() - self._started)}")

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def _seconds_left(self, step: int) -> float | None:
        """From the mean pace since this process started."""
        made = step - self._first_step
        if self._total is None or made <= 0:
            return None
        return (self._total - step) * (self._clock() - self._started) / made


def describe(metrics: Metrics, seconds_left: float | None) -> str:
    """`loss 1.2345  depth 1.09  3.2k tokens/s  ETA 4:12`, without the parts that are not known."""
    parts = []
    if "loss/prediction" in metrics or "loss" in metrics:
        parts.append(f"loss {metrics.get('loss/prediction', metrics.get('loss', 0.0)):.4f}")
    if "depth/2/share" in metrics:
        parts.append(f"depth {metrics['depth/mean']:.2f}")
    if "speed/tokens_per_second" in metrics:
        parts.append(f"{short(metrics['speed/tokens_per_second'])} tokens/s")
    if seconds_left is not None:
        parts.append(f"ETA {duration(seconds_left)}")
    return "  ".join(parts)


def short(value: float) -> str:
    """`950`, `3.2k`, `1.1M`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """`4:12` or `1:04:12`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        console=console,
        refresh_per_second=4,
    )


def _steps(total: int | None) -> str:
    return "training" if total is None else f"training for {total:,} steps"


def _depth_losses(metrics: Metrics) -> list[tuple[int, str]]:
    """(m, name) of the most telling loss that is known of each depth."""
    found, m = [], 1
    while f"depth/{m}/share" in metrics:
        for name in (f"depth/{m}/loss_measured", f"depth/{m}/loss"):
            if name in metrics:
                found.append((m, name))
                break
        m += 1
    return found
