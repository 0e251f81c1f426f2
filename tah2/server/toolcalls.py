"""Tool calls in the Hermes form that Qwen3 writes, read while they are being written.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tah2.server.marks import CLOSE, OPEN, partial_end

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class Said:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class Called:
    """A call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class Argued:
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Said | Called | Argued


class ToolCallReader:
    """Feed text in any pieces; the events of all pieces together are those of the whole text.

    What is no call after all (a tag without a readable object) comes out as text. Blanks around calls belong to
    nobody. Calls after the first `most` are dropped.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most, self.calls = most, 0
        self._held = ""
        """Not yet understood: text that may become a tag, or the body of an open call."""
        self._inside = False
        self._arguments: _Balance | None = None
        """Of the open call, once its head is read."""

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return _joined(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if not self._inside:
            if not (self.calls and self._held.isspace()):
                events = [Said(self._held)] if self._held else []
        elif self._arguments is None:
            events = self._whole(self._held, closed=False)
        self._held, self._inside = "", False
        return events

    def _step(self, events: list[Event]) -> bool:
        """Understand a bit more; returns whether there may be more to understand."""
        if not self._inside:
            return self._outside(events)
        if self._arguments is None:
            return self._head(events)
        return self._body(events)

    def _outside(self, events: list[Event]) -> bool:
        before, tag, rest = self._held.partition(OPEN)
        if tag:
            if before.strip():
                events.append(Said(before.rstrip()))
            self._held, self._inside = rest, True
            return True
        ready = before[: len(before) - partial_end(before, OPEN)].rstrip()
        if self.calls and not ready:
            return False
        if ready:
            events.append(Said(ready))
            self._held = self._held[len(ready) :]
        return False

    def _head(self, events: list[Event]) -> bool:
        found = HEAD.match(self._held)
        if found is not None:
            events += self._begin(_name(found.group(1)))
            self._arguments, self._held = _Balance(), self._held[found.end() :]
            return True
        body, tag, rest = self._held.partition(CLOSE)
        if not tag:
            return False
        events += self._whole(body, closed=True)
        self._held, self._inside = rest, False
        return True

    def _body(self, events: list[Event]) -> bool:
        assert self._arguments is not None
        if not self._arguments.done:
            used = self._arguments.read(self._held)
            if used:
                events += self._argue(self._held[:used])
                self._held = self._held[used:]
            if not self._arguments.done:
                return False
        _, tag, rest = self._held.partition(CLOSE)
        if not tag:
            return False
        self._held, self._inside, self._arguments = rest, False, None
        return True

    def _whole(self, body: str, closed: bool) -> list[Event]:
        """A call that could not be read from its head on."""
        try:
            read = json.loads(body, strict=False)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return [Said(OPEN + body + (CLOSE if closed else ""))]
        arguments = read.get("arguments", read.get("parameters", {}))
        text = _whole_letters(arguments) if isinstance(arguments, str) else json.dumps(arguments)
        return [*self._begin(_whole_letters(read["name"])), *self._argue(text)]

    def _begin(self, name: str) -> list[Event]:
        self.calls += 1
        return [] if self._dropped else [Called(self.calls - 1, name)]

    def _argue(self, text: str) -> list[Event]:
        return [] if self._dropped or not text else [Argued(self.calls - 1, text)]

    @property
    def _dropped(self) -> bool:
        return self.most is not None and self.calls > self.most


class _Balance:
    """Finds the end of a JSON object: braces outside of strings balance."""

    def __init__(self) -> None:
        self.depth, self.quoted, self.escaped, self.done = 0, False, False, False

    def read(self, text: str) -> int:
        """How many letters of `text` belong to the object."""
        for place, letter in enumerate(text):
            if self.quoted:
                if self.escaped:
                    self.escaped = False
                elif letter == "\\":
                    self.escaped = True
                elif letter == '"':
                    self.quoted = False
            elif letter == '"':
                self.quoted = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    self.done = True
                    return place + 1
        return len(text)


def _name(literal: str) -> str:
    """What a JSON string says; taken as it stands if it is none."""
    try:
        return _whole_letters(json.loads(literal, strict=False))
    except ValueError:
        return literal[1:-1]


def _whole_letters(text: str) -> str:
    """Escapes may spell half of a character, which no answer can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of the same text or arguments as one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + event.text)
        elif isinstance(event, Argued) and isinstance(last, Argued) and event.index == last.index:
            joined[-1] = Argued(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
