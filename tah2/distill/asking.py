"""From planned prompts to answers on disk: many in flight, each written as it comes, none asked twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tah2.config.strict import ConfigError
from tah2.distill.book import AnswerBook
from tah2.distill.config import RECORDED, DistillConfig
from tah2.distill.episode import Episode, uses_results
from tah2.distill.prompts import Prompt
from tah2.distill.teachers import Teacher
from tah2.evals.endpoint import Answer, EndpointRequest
from tah2.evals.records import sample_seed

REFUSALS = frozenset({400, 413, 422})
"""Statuses that mean this request, not this moment: a prompt too long, a field that the server does not know."""
HOPELESS = 16
"""So many refusals before the first answer mean that the requests themselves are wrong."""


@dataclass(frozen=True)
class Failure:
    """Why a prompt has no answer, or not all of its samples. Nothing of it is written down: the next run asks again."""

    reason: str
    refused: bool


@dataclass(eq=False)
class Asked:
    """An episode under way."""

    episode: Episode
    sample: int
    seeds: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str = ""

    def take(self, answer: Answer) -> None:
        if not self.episode.steps:
            self.prompt_tokens, self.completion_tokens = answer.prompt_tokens, 0
        if self.completion_tokens is not None:
            written = answer.completion_tokens
            self.completion_tokens = None if written is None else self.completion_tokens + written
        self.model = answer.model
        self.episode.feed(answer.choices[0])

    def record(self) -> dict[str, Any]:
        """The line of the book; it says nothing that a repetition of the run would not say again."""
        episode = self.episode
        return {
            "key": episode.prompt.key,
            "sample": self.sample,
            "seeds": self.seeds,
            "model": self.model,
            "messages": episode.written,
            "finish_reason": episode.finish_reason,
            "replayed": episode.replayed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


class RequestQueue:
    """Requests in turn: first the next turns of episodes under way, then new prompts.

    An iterator that may have something again after it had nothing, once an answer has come.
    """

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        prompts: Iterable[Prompt],
        book: AnswerBook,
        done: Callable[[int], None],
    ) -> None:
        self.config, self.teacher, self.book, self.done = config, teacher, book, done
        self.going_on: deque[Asked] = deque()
        self._new = self._asked(prompts)

    def __iter__(self) -> RequestQueue:
        return self

    def __next__(self) -> tuple[Asked, EndpointRequest]:
        asked = self.going_on.popleft() if self.going_on else next(self._new)
        prompt, seed = asked.episode.prompt, self._seed(asked)
        asked.seeds.append(seed)
        return asked, self.teacher.request(asked.episode.context, prompt.tools, self.config.sampling, seed)

    def _asked(self, prompts: Iterable[Prompt]) -> Iterator[Asked]:
        """Episodes to begin; recorded answers that stay as they are go straight into the book."""
        for prompt in prompts:
            if keeps_recorded(self.config, prompt):
                if (prompt.key, 0) not in self.book:
                    self.book.append(recorded_answer(prompt))
                    self.done(0)
                continue
            for sample in range(self.config.sampling.samples):
                if (prompt.key, sample) not in self.book:
                    yield Asked(Episode(prompt), sample)

    def _seed(self, asked: Asked) -> int:
        """Of prompt, sample and turn, so that neither order nor interruptions change what is drawn."""
        turn = f"{asked.episode.prompt.key}/{asked.episode.steps}"
        return sample_seed(self.config.sampling.seed, "distill", turn, asked.sample)


def ask(
    config: DistillConfig, teacher: Teacher, prompts: Iterable[Prompt], book: AnswerBook, done: Callable[[int], None]
) -> dict[str, Failure]:
    """Ask for what `book` lacks; returns what went wrong, by the prompt's key.

    `done` is called with the number of response tokens after every answer that is written down.
    """
    queue, failures = RequestQueue(config, teacher, prompts, book, done), dict[str, Failure]()
    answered = 0
    for asked, answer in teacher.answers(queue):
        if answer.error is not None:
            refused = answer.status in REFUSALS
            failures[asked.episode.prompt.key] = Failure(answer.error, refused)
            if refused and not answered and len(failures) >= HOPELESS:
                raise ConfigError(f"Nothing but refusals so far: {answer.error}.")
            continue
        answered += 1
        asked.take(answer)
        if asked.episode.running:
            queue.going_on.append(asked)
            continue
        book.append(asked.record())
        done(asked.completion_tokens or 0)
    return failures


def recorded_answer(prompt: Prompt) -> dict[str, Any]:
    last = max((i for i, m in enumerate(prompt.recorded) if m["role"] == "assistant"), default=-1)
    return {
        "key": prompt.key,
        "sample": 0,
        "seeds": [],
        "model": RECORDED,
        "messages": list(prompt.recorded[: last + 1]),
        "finish_reason": "stop",
        "replayed": 0,
        "prompt_tokens": None,
        "completion_tokens": None,
    }


def keeps_recorded(config: DistillConfig, prompt: Prompt) -> bool:
    return config.teacher.recorded or (config.tool_results == "keep" and uses_results(prompt.recorded))
