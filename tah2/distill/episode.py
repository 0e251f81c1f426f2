"""One answer of the teacher to one prompt: a response, or a walk through recorded tool results.

Where the recorded answer calls no tools, an episode is one response. Where it does, nobody can run the tools again,
so their recorded results are replayed: the teacher writes the first turn; while its calls are the recorded ones (the
same functions with the same arguments, in order), the recorded results answer them and the teacher writes the next
turn. At its first other call, or its first turn without a call, the episode ends: every assistant message in it is
the teacher's, and every result in it answers the very call before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tah2.data.conversation import Message
from tah2.distill.prompts import Prompt
from tah2.evals.endpoint import Choice

Call = tuple[str, str]
"""A function's name and its arguments as canonical JSON."""

WRITTEN_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
OPEN_CALL = re.compile(r"<tool_call>(?!.*</tool_call>)", re.DOTALL)
THINKING = re.compile(r"\A\s*(?:<think>)?.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """A recorded assistant message and the tool results behind it."""

    calls: tuple[Call, ...]
    results: tuple[Message, ...]


class Episode:
    """What the teacher has written so far; `context` is the prompt of its next turn while `running`."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.written: list[Message] = []
        self.finish_reason: str | None = None
        self.replayed = 0
        """Tool results taken over from the recorded answer."""
        self._turns = recorded_turns(prompt.recorded)
        self.running = True

    @property
    def context(self) -> tuple[Message, ...]:
        return (*self.prompt.messages, *self.written)

    @property
    def steps(self) -> int:
        return sum(message["role"] == "assistant" for message in self.written)

    def feed(self, choice: Choice) -> None:
        """Take the teacher's next turn, and the recorded results of its calls where they are the recorded calls."""
        message, step = assistant_message(choice), self.steps
        self.written.append(message)
        self.finish_reason = choice.finish_reason
        calls = calls_of(message)
        recorded = self._turns[step] if step < len(self._turns) else Turn((), ())
        self.running = bool(calls) and calls == recorded.calls and bool(recorded.results)
        if self.running:
            self.written += _answering(recorded.results, message)
            self.replayed += len(recorded.results)


def recorded_turns(recorded: Sequence[Message]) -> list[Turn]:
    """The assistant turns of a recorded answer; a turn with malformed calls can never be replayed."""
    starts = [i for i, message in enumerate(recorded) if message["role"] == "assistant"]
    ends = [*starts[1:], len(recorded)]
    return [
        Turn(calls_of(recorded[i]) or (), tuple(recorded[i + 1 : end])) for i, end in zip(starts, ends, strict=False)
    ]


def uses_results(recorded: Sequence[Message]) -> bool:
    return any(message["role"] == "tool" for message in recorded)


def assistant_message(choice: Choice) -> Message:
    """The message that a row keeps: text as it came, thinking and calls apart where the server splits them off.

    Some templates open the think block in the prompt, so that the text holds its end alone: the begin is put back.
    """
    text = choice.text
    if "</think>" in text and "<think>" not in text:
        text = f"<think>\n{text.lstrip(chr(10))}"
    message: Message = {"role": "assistant", "content": text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_with_object(call) for call in choice.tool_calls]
    return message


def answer_text(message: Message) -> str:
    """What is said when the thinking is over."""
    return THINKING.sub("", str(message["content"]), count=1).strip()


def calls_of(message: Message) -> tuple[Call, ...] | None:
    """The tool calls of a message, structured or written as `<tool_call>` JSON; None where one is malformed."""
    text = answer_text(message)
    if OPEN_CALL.search(text):
        return None
    try:
        raw = [*message.get("tool_calls", ()), *(json.loads(found) for found in WRITTEN_CALL.findall(text))]
        return tuple(_call(entry) for entry in raw)
    except (ValueError, TypeError, KeyError):
        return None


def _call(raw: Any) -> Call:
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping):
        raise TypeError("a call is an object")
    arguments = function.get("arguments") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict) or not isinstance(function["name"], str):
        raise TypeError("a call needs a name and an object of arguments")
    return function["name"], json.dumps(arguments, sort_keys=True)


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A server's call with its arguments as an object, as chat templates expect; left alone where they are not one."""
    function = dict(call.get("function") or {})
    with suppress(TypeError, ValueError):
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    kept: dict[str, Any] = {"type": "function", "function": function}
    return kept | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _answering(results: Sequence[Message], message: Message) -> list[Message]:
    """Recorded results under the ids of the teacher's own calls, in order."""
    ids = [call.get("id") for call in message.get("tool_calls", ())]
    if len(ids) != len(results):
        return [dict(result) for result in results]
    return [
        {
            **{key: value for key, value in result.items() if key != "tool_call_id"},
            **({"tool_call_id": name} if name else {}),
        }
        for result, name in zip(results, ids, strict=True)
    ]
