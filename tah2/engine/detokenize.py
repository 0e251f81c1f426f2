"""Token by token to text: whole characters only, stop strings found however tokens cut them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What tokenizers decode half a character to."""
CONTEXT = 6
"""Prompt tokens decoded before the first new one, so that spaces come out as in the whole text."""


class Detokenizer:
    """Text of a growing output.

    `text` holds all whole characters so far; `ready` leaves out what may yet become part of a stop string.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.tokenizer, self.stops, self.keep_stop, self.skip = tokenizer, list(stops), keep_stop, skip_special_tokens
        self._ids = [int(token) for token in prompt[-CONTEXT:]]
        self._start, self._read = 0, len(self._ids)
        """_ids[_start:_read] is context whose text is out already; _ids[_read:] waits for whole characters."""
        self.text = ""
        self.stopped: str | None = None
        self._ended = False

    @property
    def ready(self) -> str:
        """Text that no later token can take back."""
        if self._ended or self.stopped is not None or not self.stops:
            return self.text
        longest = max(len(stop) for stop in self.stops) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.stops):
                return self.text[:-length]
        return self.text

    def add(self, token: int, look_for_stops: bool = True) -> bool:
        """Append a token; returns whether a stop string has appeared (the text is then cut there)."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return False
        return self._out(now[len(before) :], look_for_stops)

    def end(self) -> None:
        """No more tokens: half a character is written as the tokenizer writes it."""
        self._ended = True
        if self.stopped is None:
            before = self._decode(self._ids[self._start : self._read])
            now = self._decode(self._ids[self._start :])
            self._out(now[len(before) :], look_for_stops=False)

    def _out(self, new: str, look_for_stops: bool) -> bool:
        self._start, self._read = self._read, len(self._ids)
        searched = len(self.text)
        self.text += new
        if not look_for_stops:
            return False
        found = [
            (at, stop) for stop in self.stops if (at := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        at, stop = min(found, key=lambda hit: (hit[0], hit[1]))
        self.stopped = stop
        self.text = self.text[: at + len(stop)] if self.keep_stop else self.text[:at]
        return True

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)
        return text
