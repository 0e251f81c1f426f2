"""Split `<think>...</think>` from the answer while it is being written."""

from __future__ import annotations

from enum import Enum

from tah2.server.marks import END_THINK, THINK, partial_end


class State(Enum):
    START = "start"
    THINKING = "thinking"
    ANSWERING = "answering"


class ReasoningSplitter:
    """Feed text in any pieces; get (reasoning, answer) that no later piece takes back.

    A block counts where it opens the output, or where the prompt has opened it. Blank lines around it belong to
    nobody.
    """

    def __init__(self, inside: bool = False) -> None:
        self.state = State.THINKING if inside else State.START
        self._held = ""
        self._fresh = True
        """Nothing but blanks has come since the last mark."""

    @property
    def thinking(self) -> bool:
        return self.state is State.THINKING

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning, answer = "", ""
        while True:
            state = self.state
            if state is State.START:
                self._open()
            elif state is State.THINKING:
                reasoning += self._think()
            else:
                answer += self._answer()
            if self.state is state:
                return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """No more text: what was held back comes out."""
        held, self._held = self._held, ""
        if self.state is State.THINKING:
            return held.rstrip("\n"), ""
        return "", "" if self.state is State.ANSWERING and self._fresh else held

    def _open(self) -> None:
        start = self._held.lstrip()
        if start.startswith(THINK):
            self._held = start[len(THINK) :]
            self.state, self._fresh = State.THINKING, True
        elif not THINK.startswith(start):
            self.state, self._fresh = State.ANSWERING, False

    def _think(self) -> str:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        thought, mark, rest = self._held.partition(END_THINK)
        if mark:
            self.state, self._held, self._fresh = State.ANSWERING, rest, True
            return thought.rstrip("\n")
        keep = partial_end(self._held, END_THINK)
        ready = self._held[: len(self._held) - keep].rstrip("\n")
        self._held = self._held[len(ready) :]
        return ready

    def _answer(self) -> str:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        ready, self._held = self._held, ""
        return ready
