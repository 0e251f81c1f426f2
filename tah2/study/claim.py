"""One claim of the paper beside what a study found, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tah2.evals.statistics import Interval
from tah2.study.layout import Results


@dataclass(frozen=True)
class Claim:
    claim: str
    paper: str
    ours: str
    holds: bool


Check = Callable[[Results, str], Iterator[Claim]]
"""(results, main variant) -> the claims that the study can judge."""


def title_of(results: Results, name: str) -> str:
    return results.of(name)[0].info.title


def points(share: float) -> str:
    """A share as points of a hundred."""
    return f"{100 * share:.1f}"


def shown(interval: Interval) -> str:
    """A difference of shares in points, with its interval."""
    return f"{100 * interval.estimate:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
