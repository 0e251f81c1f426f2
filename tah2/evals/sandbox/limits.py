"""What a program may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tah2.config.strict import ConfigError

BUSY = 10
"""Seconds by the clock for a second of processor time, where only the latter should decide."""


@dataclass(frozen=True)
class Limits:
    """Ceilings of one run; a program that reaches one is stopped with everything that it started."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_mb: int = 1024
    """Of each process beyond what its worker holds, and of all processes together."""
    processes: int = 64
    """Processes and threads at a time."""
    file_mb: int = 64
    """All files in the temporary directory together."""
    open_files: int = 256
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ConfigError(f"The sandbox limit {name} must be positive, not {value}.")


Kind = Literal["room", "fence", "none"]
"""What a program is kept in: namespaces of its own, a Landlock fence in the machine's tree, or limits alone."""
Ending = Literal["done", "failed", "time", "memory", "output", "crashed"]
"""A harness that raised has "failed"; a process that vanished without a word has "crashed"."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `reply` is what the harness returned if it is "done", what it raised if it has "failed"."""

    ending: Ending
    reply: Any = None
    output: str = ""
    seconds: float = 0.0
    status: int = 0
    """Exit status of the program, negative for the signal that ended it."""


class SandboxError(ConfigError):
    """The machine grants too few protections to run model-written code."""
