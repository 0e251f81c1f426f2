"""What a grader is: how a response becomes a request to the sandbox, and a reply a grade."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tah2.config.strict import ConfigError
from tah2.evals.sandbox import Limits, Outcome
from tah2.evals.task import Grade, Problem

Request = dict[str, Any]


class Answered(Protocol):
    """What a grader reads of a sample record; a bare string stands for one without `extra`."""

    @property
    def text(self) -> str: ...
    @property
    def extra(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Said:
    text: str
    extra: Mapping[str, Any]


Response = str | Answered


def answered(response: Response) -> Answered:
    return Said(response, {}) if isinstance(response, str) else response


@dataclass(frozen=True)
class Package:
    """A library that a grader runs, in the version that scores are stated for.

    `own_folder`: several versions may be wanted at once, so it may lie in a folder of its own instead.
    """

    name: str
    version: str
    module: str
    no_deps: bool = False
    own_folder: bool = False

    def folder(self) -> Path:
        return Path(sys.prefix) / "share" / "tah2" / f"{self.name}-{self.version}"

    def path(self) -> tuple[str, ...]:
        """What to put before the import path; empty where the environment has it. Raises where it is not installed."""
        if self.own_folder and (self.folder() / self.module).is_dir():
            return (str(self.folder()),)
        try:
            found = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"This grader needs {self.name} {self.version}: {self.install()}.") from None
        if found != self.version:
            raise ConfigError(f"This grader needs {self.name} {self.version}, not {found}: {self.install()}.")
        return ()

    def install(self) -> str:
        target = f"--target {self.folder()} " if self.own_folder else ""
        return f"pip install {'--no-deps ' if self.no_deps else ''}{target}{self.name}=={self.version}"


@dataclass(frozen=True)
class Grader:
    """`request` and `verdict` run here, `harness` (`module:function`) in the sandbox, a batch of requests at a time.

    A grader without a harness judges by `here` alone, which must neither run nor evaluate what a model wrote.
    """

    name: str
    request: Callable[[Problem, Answered], Request | Grade] | None = None
    verdict: Callable[[Problem, Any], Grade] | None = None
    harness: str = ""
    here: Callable[[Problem, Answered], Grade] | None = None
    packages: tuple[Package, ...] = ()
    optional: tuple[Package, ...] = ()
    """Used where they are installed; a score says which."""
    preload: tuple[str, ...] = ()
    limits: Callable[[Sequence[Request]], Limits] = lambda requests: Limits()
    batch: int = 1

    def path(self) -> tuple[str, ...]:
        return tuple(folder for package in self.packages for folder in package.path())

    def versions(self) -> dict[str, str]:
        """Package -> version that a score by this grader states."""
        used = {package.name: package.version for package in self.packages}
        for package in self.optional:
            try:
                package.path()
            except ConfigError:
                continue
            used[package.name] = package.version
        return used


GRADER_FAILED = "grader failed"


def stopped(outcome: Outcome) -> Grade:
    """The grade of a response whose grading did not come to an end: wrong, with the reason."""
    reasons = {
        "failed": f"{GRADER_FAILED}: {outcome.reply}",
        "time": "stopped: out of time",
        "memory": "stopped: out of memory",
        "output": "stopped: too much output",
        "crashed": f"stopped: the program ended the grader (status {outcome.status})",
    }
    return Grade(0.0, reasons[outcome.ending])
