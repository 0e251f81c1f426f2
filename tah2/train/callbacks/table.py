"""Loggers by name, and the usual set of listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tah2.config.strict import ConfigError, suggestion
from tah2.train.callbacks.base import Callback, Callbacks
from tah2.train.callbacks.jsonl import JsonlLog
from tah2.train.callbacks.progress import ProgressBar
from tah2.train.callbacks.tensorboard import TensorBoardLog
from tah2.train.callbacks.wandb import WandbLog

LOGGERS: dict[str, Callable[[], Callback]] = {"tensorboard": TensorBoardLog, "wandb": WandbLog}
"""What `loggers` may name, beside the JSON lines and the progress bar that come with every run."""


def default_loggers() -> tuple[str, ...]:
    """TensorBoard where it is installed."""
    return ("tensorboard",) if TensorBoardLog.installed() else ()


def check_loggers(names: Iterable[str]) -> None:
    """Refuse names that are not in the table."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"Unknown logger {name!r}{suggestion(name, LOGGERS)}.")


def make_callbacks(
    loggers: Sequence[str] | None = None,
    *,
    rank: int = 0,
    progress: bool = True,
    extra: Iterable[Callback] = (),
) -> Callbacks:
    """JSON lines, the named loggers (None: the default ones), the progress bar, and `extra`; nobody on other ranks.

    Where one of `extra` owns the screen, it stands in for the progress bar.
    """
    names = default_loggers() if loggers is None else tuple(dict.fromkeys(loggers))
    check_loggers(names)
    if rank != 0:
        return Callbacks()
    extra = tuple(extra)
    taken = any(callback.owns_screen for callback in extra)
    bar = [ProgressBar()] if progress and not taken else []
    return Callbacks([*bar, JsonlLog(), *(LOGGERS[name]() for name in names), *extra])
