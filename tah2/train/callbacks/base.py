"""The seam between the trainer and its listeners."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tah2.config.strict import ConfigError

Level = Literal["info", "warning", "error"]
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class RunInfo:
    """What a listener learns when training starts, anew or from a checkpoint."""

    folder: Path
    name: str
    start_step: int = 0
    """Steps that a resumed run has already made; 0 for a new run."""
    total_steps: int | None = None
    """None where the budget is not known in steps."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Plain values: what `strict.plain` makes of the run's configuration."""
    project: str = "tah2"


class Callback:
    """Override what you care about. The trainer calls it on rank 0 alone, between steps, in order of steps."""

    shows_messages = False
    """Do people see `on_message`? Where no listener shows them, messages go to stderr."""
    owns_screen = False
    """Is it the one that people watch, in place of the usual progress bar?"""

    def on_start(self, run: RunInfo) -> None:
        """Before the first step. A ConfigError raised here ends the run: the user asked for something impossible."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """A logged step; names as in `tah2.train.metrics`."""

    def on_validation(self, step: int, metrics: Metrics) -> None:
        """A validation after `step`; the same names, without a prefix."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint at `path` is complete."""

    def on_message(self, level: Level, text: str) -> None:
        """Something to tell people, in one sentence or two."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Once, however the run ends; `summary["status"]` is "finished", "interrupted" or "failed"."""


class Callbacks(Callback):
    """All listeners as one. A listener that fails is reported once and not called again; training goes on."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.active = list(callbacks)

    def on_start(self, run: RunInfo) -> None:
        self._each("on_start", lambda callback: callback.on_start(run), fatal=ConfigError)

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._each("on_step", lambda callback: callback.on_step(step, metrics))

    def on_validation(self, step: int, metrics: Metrics) -> None:
        self._each("on_validation", lambda callback: callback.on_validation(step, metrics))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._each("on_checkpoint", lambda callback: callback.on_checkpoint(step, path))

    def on_message(self, level: Level, text: str) -> None:
        if not any(callback.shows_messages for callback in self.active):
            sys.stderr.write(f"{level}: {text}\n")
        self._each("on_message", lambda callback: callback.on_message(level, text))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._each("on_end", lambda callback: callback.on_end(summary))

    def _each(self, event: str, tell: Callable[[Callback], None], fatal: type[Exception] | tuple[()] = ()) -> None:
        failures = []
        for callback in tuple(self.active):
            try:
                tell(callback)
            except fatal:
                raise
            except Exception as error:
                self.active.remove(callback)
                failures.append(_failure(callback, event, error))
        for text in failures:
            self.on_message("warning", text)


def _failure(callback: Callback, event: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or "no message"
    return (
        f"{type(callback).__name__} failed in {event} ({type(error).__name__}: {reason}) and is switched off "
        "for the rest of this run; training goes on."
    )
