"""The world of a study: held-out data, test problems and an exact verifier, from a recipe's procedural task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tah2.data.procedural import ProceduralConfig, prompt_and_response
from tah2.data.store import TokenStore

TEST_SEED = 1_000_003
"""Added to the seed of a task that has no test split of its own, so that its problems are of another stream."""


@dataclass(frozen=True)
class Problem:
    id: str
    family: str
    prompt: tuple[int, ...]
    known: Any
    """What the verifier needs."""


@dataclass(frozen=True)
class Verdict:
    correct: bool
    exact: bool
    answer: str
    """What is voted on; empty where there is none."""


class World(Protocol):
    def validation(self, count: int, seed: int) -> TokenStore: ...

    def problems(self, count: int, seed: int) -> list[Problem]:
        """Of the test split, families mixed."""
        ...

    def grade(self, problem: Problem, response: Sequence[int]) -> Verdict: ...

    def text(self, ids: Sequence[int]) -> str:
        """Token ids for people, a space between tokens."""
        ...


def open_world(config: ProceduralConfig) -> World:
    """The world that a recipe's `procedural` section trains on."""
    task: Any = config.build_task()
    return SplitWorld(task) if hasattr(task, "problems") else ChaseWorld(config.task, task)


class SplitWorld:
    """A task that has test problems, families and words of its own (the pocket world)."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def validation(self, count: int, seed: int) -> TokenStore:
        return self.task.generate(count, seed, "validation")

    def problems(self, count: int, seed: int) -> list[Problem]:
        found = self.task.problems(count, seed, "test")
        return [Problem(p.id, p.family, tuple(int(token) for token in p.prompt_ids), p) for p in found]

    def grade(self, problem: Problem, response: Sequence[int]) -> Verdict:
        verdict = self.task.verify(problem.known, list(response))
        return Verdict(bool(verdict.correct), bool(verdict.exact), answer_in(self.text(response)))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.task.text(ids))


class ChaseWorld:
    """The small chase tasks: test problems are samples of another stream, and the trace is what counts."""

    def __init__(self, name: str, task: Any) -> None:
        self.name, self.task = name, task

    def validation(self, count: int, seed: int) -> TokenStore:
        return self.task.generate(count, seed, "validation")

    def problems(self, count: int, seed: int) -> list[Problem]:
        store = self.task.generate(count, seed + TEST_SEED, "validation")
        prompts = [tuple(prompt_and_response(store, index)[0]) for index in range(count)]
        return [Problem(f"{self.name}-test-{i}", self.name, prompt, prompt) for i, prompt in enumerate(prompts)]

    def grade(self, problem: Problem, response: Sequence[int]) -> Verdict:
        trace = self.task.verify(problem.known, list(response))
        return Verdict(bool(trace.answer), bool(trace.exact), answer_in(self.text(response)))

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(self.task.vocabulary.describe(int(token)) for token in ids)


def answer_in(text: str) -> str:
    """The final answer of a response that ended: what follows its answer mark, or all of it where it has none."""
    words = text.split()
    ends = [index for index, word in enumerate(words) if word in ("EOS", "<eos>")]
    if not ends:
        return ""
    words = words[: ends[0]]
    marks = [index for index, word in enumerate(words) if word in ("HASH", "#")]
    return " ".join(words[marks[0] + 1 :] if marks else words)
