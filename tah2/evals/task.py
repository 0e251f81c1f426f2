"""A task is a small declarative object: where its rows come from, how a row is asked, who grades the answer.

`tah2.evals.tasks` holds the table of tasks, `tah2.evals.graders` the graders; neither needs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tah2.config.strict import ConfigError
from tah2.evals.sources import Rows, Source, read_rows

Domain = Literal["math", "qa", "code", "tool use"]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Decoding:
    """How responses are drawn unless the user says otherwise: the paper's settings."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    max_tokens: int = 32_768
    exit_threshold: float = 0.5


SAMPLED = Decoding()
GREEDY = Decoding(temperature=0.0, top_p=1.0, top_k=0)


@dataclass(frozen=True)
class Problem:
    """One question. `messages` suit a chat template; `text` is the prompt for a model that has none.

    `data` is the row that the grader reads (gold answer, tests, ...); it never enters a prompt.
    """

    id: str
    messages: tuple[Message, ...]
    text: str
    data: Mapping[str, Any] = field(repr=False)


class Grade(NamedTuple):
    """The verdict on one response; `correct` is 0 or 1.

    `answer` is the answer in a form that equal answers share (for votes), or None where there is none to compare.
    `parts` holds further verdicts that a benchmark reports beside the main one, such as MBPP's `plus` tests.
    """

    correct: float
    note: str = ""
    answer: str | None = None
    parts: Mapping[str, float] = {}


@dataclass(frozen=True)
class Task:
    """Source, prompt, grader and metric of one benchmark.

    `make_problem` turns one row (in the field names of the local file) into a `Problem`. `version` is raised whenever
    prompt or grading changes, so that scores of two versions are never mixed. `caveat` stands beside every score.
    """

    name: str
    title: str
    domain: Domain
    count: int
    repeats: int
    source: Source
    make_problem: Callable[[Mapping[str, Any]], Problem]
    grader: str
    decoding: Decoding = SAMPLED
    multi_turn: bool = False
    text_stop: tuple[str, ...] = ()
    """Where a model without a chat template has left the problem: strings that end its answer to `Problem.text`."""
    version: int = 1
    caveat: str = ""

    def __post_init__(self) -> None:
        if self.greedy and self.repeats != 1:
            raise ConfigError(f"Task {self.name!r} is greedy, so every repeat would be the same: set repeats to 1.")

    @property
    def greedy(self) -> bool:
        return self.decoding.temperature == 0

    @property
    def metric(self) -> str:
        return "avg@1 (greedy)" if self.greedy else f"avg@{self.repeats}"

    def load(self, data_dir: str | Path | None = None) -> LoadedTask:
        """Read every problem from `data_dir`, the folder in TAH2_BENCHMARKS, or the Hugging Face hub, in that order."""
        rows = read_rows(self.source, data_dir)
        problems = tuple(self.make_problem(row) for row in rows)
        if len({problem.id for problem in problems}) != len(problems):
            raise ConfigError(f"{rows.origin} repeats the id of a problem; ids must be unique.")
        return LoadedTask(self, problems, rows)

    def problems(self, data_dir: str | Path | None = None) -> list[Problem]:
        return list(self.load(data_dir).problems)


@dataclass(frozen=True)
class LoadedTask:
    """A task with its problems and the truth about where they came from."""

    task: Task
    problems: tuple[Problem, ...]
    rows: Rows = field(repr=False)

    def provenance(self) -> dict[str, Any]:
        """What a score must say of its data: origin, fingerprint, number of problems, caveats."""
        caveats = [self.task.caveat, *self.rows.caveats]
        if len(self.problems) != self.task.count:
            caveats.append(f"{len(self.problems)} of {self.task.count} problems")
        return {
            "task": self.task.name,
            "version": self.task.version,
            "origin": self.rows.origin,
            "sha256": self.rows.sha256,
            "problems": len(self.problems),
            "caveats": [caveat for caveat in caveats if caveat],
        }
