"""Which replica runs a request: the one that knows its beginning, unless it is much busier than another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tah2.config.strict import ConfigError


@dataclass(frozen=True)
class RoutingConfig:
    block: int = 32
    """Prompts are compared in blocks of this many tokens."""
    slack: int = 4
    """A replica that knows a prompt's beginning may have this many requests more than the least busy one."""
    memory: int = 1 << 16
    """Blocks remembered, over all replicas."""

    def __post_init__(self) -> None:
        for name in ("block", "memory"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.slack < 0:
            raise ConfigError(f"slack must not be negative, but is {self.slack}.")


class Router:
    """Remembers which replica saw which beginnings. Wrong guesses cost time, never an answer."""

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self.config = config or RoutingConfig()
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Hash of a beginning -> the replica that ran it last; the oldest are forgotten first."""
        self._turn = 0

    def choose(self, loads: Sequence[int | None], prompt: Sequence[int], family: Hashable = None) -> int:
        """The replica for `prompt`; `loads` are requests in flight, None where a replica cannot take any.

        `family` keeps apart what cannot share a cache. At least one replica must be able to take the request.
        """
        open_ = [at for at, load in enumerate(loads) if load is not None]
        least = min(load for load in loads if load is not None)
        marks = self._marks(prompt, family)
        chosen = None
        for mark in reversed(marks):
            knows = self._seen.get(mark)
            if knows is not None and knows < len(loads) and (load := loads[knows]) is not None:
                chosen = knows if load <= least + self.config.slack else None
                break
        if chosen is None:
            idle = [at for at in open_ if loads[at] == least]
            chosen = idle[self._turn % len(idle)]
            self._turn += 1
        self._remember(marks, chosen)
        return chosen

    def forget(self, replica: int) -> None:
        """Its cache is gone."""
        for mark in [mark for mark, at in self._seen.items() if at == replica]:
            del self._seen[mark]

    def _marks(self, prompt: Sequence[int], family: Hashable) -> list[int]:
        """One hash per whole block, each of everything up to its end."""
        size, mark, marks = self.config.block, hash(family), []
        for end in range(size, len(prompt) + 1, size):
            mark = hash((mark, *prompt[end - size : end]))
            marks.append(mark)
        return marks

    def _remember(self, marks: Sequence[int], replica: int) -> None:
        for mark in marks:
            self._seen[mark] = replica
            self._seen.move_to_end(mark)
        while len(self._seen) > self.config.memory:
            self._seen.popitem(last=False)
