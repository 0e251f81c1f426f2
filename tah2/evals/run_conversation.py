"""A sample while it is generated: one call for most tasks, as many as it takes for a multi-turn one.

A backend (engine or server) answers calls; it knows neither tasks nor records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tah2.evals.records import ERROR, SampleRecord
from tah2.evals.run_plan import Sample

LENGTH = "length"


@dataclass(frozen=True)
class Asked:
    """The next call: a conversation, or the problem itself where `messages` is None."""

    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Call:
    """The answer to one call; fields as in `SampleRecord`."""

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    prompt_depth_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    decode_flops: int | None = None
    seconds: float | None = None
    first_token_seconds: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def failed(reason: str) -> Call:
    return Call("", ERROR, extra={"error": reason})


class Conversation:
    """`asked` is the call to answer now; `answer` takes what came and returns whether there is another."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.calls: list[Call] = []
        self._story: dict[str, Any] = {}
        self._episode: Generator[Any, str | None, dict[str, Any]] | None = None
        self.asked = Asked()
        if sample.multi_turn:
            from tah2.evals.episode import episode
            from tah2.evals.tasks import task_named

            self._episode = episode(task_named(sample.task), sample.problem)
            self._advance(None)

    def answer(self, call: Call) -> bool:
        self.calls.append(call)
        if self._episode is None or call.finish_reason == ERROR:
            return False
        return self._advance(call.text)

    def refuse(self, reason: str) -> None:
        """The next call cannot run: no room for a conversation that has grown, an error for anything else."""
        if self._episode is None or not self.calls:
            self.calls.append(failed(reason))
            return
        self.calls[-1] = dataclasses.replace(self.calls[-1], finish_reason=LENGTH)
        self._advance(None)

    def _advance(self, text: str | None) -> bool:
        """Let the episode begin, or go on to its next call; None in place of an answer: there was no room for one."""
        assert self._episode is not None
        try:
            ask = self._episode.send(text)
        except StopIteration as end:
            self._story = dict(end.value or {})
            return False
        self.asked = Asked(ask.messages, ask.tools)
        return True

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()

    def record(self) -> SampleRecord:
        """One record of all calls: tokens and depths one behind the other, costs and times added up.

        Where there were several calls, `extra["calls"]` says where each begins and what it cost.
        """
        sample, calls = self.sample, self.calls
        last = calls[-1]
        extra = {**self._story, **last.extra}
        if sample.multi_turn:
            extra["calls"] = [_summary(call) for call in calls]
        reason = last.finish_reason
        if reason != ERROR and any(call.finish_reason == LENGTH for call in calls):
            reason = LENGTH
        return SampleRecord(
            task=sample.task,
            problem=sample.problem.id,
            repeat=sample.repeat,
            seed=sample.seed,
            prompt_tokens=calls[0].prompt_tokens,
            prompt_depth_counts=calls[0].prompt_depth_counts,
            token_ids=[token for call in calls for token in call.token_ids],
            depths=[depth for call in calls for depth in call.depths],
            text=last.text,
            finish_reason=reason,
            decode_flops=_sum([call.decode_flops for call in calls]),
            seconds=_sum([call.seconds for call in calls]),
            first_token_seconds=calls[0].first_token_seconds,
            extra=extra,
        )


def _summary(call: Call) -> dict[str, Any]:
    return {
        "tokens": len(call.token_ids),
        "prompt_tokens": call.prompt_tokens,
        "prompt_depth_counts": call.prompt_depth_counts,
        "decode_flops": call.decode_flops,
        "finish_reason": call.finish_reason,
    }


def _sum(values: Sequence[Any]) -> Any:
    return None if any(value is None for value in values) else sum(values)
