"""Slot lists: which slots a query of each depth reads, derived from the visibility rule alone.

For every depth a request keeps the slots of its settled tokens that a later query of that depth reads, ordered by
(position, depth). Under the duo-causal rule the list of depth m holds the slots of depth <= m, and its length is the
S of the FLOPs formula. Other rules are other lists over the same pool: an exited token's slot stands in several
lists (last-exited), or all depths share one list (base-stream).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tah2.engine.pool import Slots
from tah2.visibility import Rule

Depths = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Sight:
    """A rule's two predicates as tables for depths 1..M; index 0 is unused."""

    max_depth: int
    earlier: Mask
    """[list, j, last]: a query of that list reads entry j of an earlier token of `last` executed depths"""
    own: Mask
    """[m, j]: a query at depth m reads entry j of its own token"""
    list_of: tuple[int, ...]
    """[m]: depths that read alike share a list"""
    never_waits: bool
    """What (t+1, d) reads of token t is settled once (t, d) has run, whatever t does deeper."""

    @property
    def lists(self) -> int:
        return len(self.earlier)

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, rule: Rule, max_depth: int) -> Sight:
        depths = range(1, max_depth + 1)
        tables: list[Mask] = []
        list_of = [0]
        own = np.zeros((max_depth + 1, max_depth + 1), dtype=np.bool_)
        for m in depths:
            table = np.zeros((max_depth + 1, max_depth + 1), dtype=np.bool_)
            for j in depths:
                own[m, j] = j <= m and bool(rule.own(j, m))
                for last in range(j, max_depth + 1):
                    table[j, last] = bool(rule.earlier(j, m, last))
            for known, other in enumerate(tables):
                if np.array_equal(table, other):
                    list_of.append(known)
                    break
            else:
                list_of.append(len(tables))
                tables.append(table)
        never_waits = all(
            np.array_equal(tables[list_of[m]][:, last], tables[list_of[m]][:, m])
            for m in depths
            for last in range(m, max_depth + 1)
        )
        return cls(max_depth, np.stack(tables), own, tuple(list_of), never_waits)

    def read_of(self, depth: int, slots: Slots, executed: Depths) -> Slots:
        """Slots that a query at `depth` reads of earlier tokens `[n]`.

        `slots` `[n, M]` holds the slot of depth j in column j - 1; `executed` `[n]`.
        """
        j = np.arange(1, self.max_depth + 1)
        return slots[self.earlier[self.list_of[depth]][j[None, :], executed[:, None]]]


class Growing:
    """A numpy array of int64 that grows at its end in amortised constant time."""

    def __init__(self) -> None:
        self._buffer: Slots = np.empty(16, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, values: Slots) -> None:
        end = self._length + len(values)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = values
        self._length = end

    @property
    def view(self) -> Slots:
        return self._buffer[: self._length]


@dataclass(frozen=True)
class TokenSlots:
    """The slots of consecutive tokens, settled: ragged over depths."""

    depths: Depths
    """executed depths `[n]`"""
    looped: Slots
    """`[sum of depths]`, ordered by (position, depth)"""
    once: Slots
    """`[n]` where layers run once per token, else `[0]`"""

    def __len__(self) -> int:
        return len(self.depths)

    def part(self, start: int, end: int) -> TokenSlots:
        bounds = np.concatenate([[0], self.depths.cumsum()])
        return TokenSlots(self.depths[start:end], self.looped[bounds[start] : bounds[end]], self.once[start:end])

    @staticmethod
    def none() -> TokenSlots:
        nothing = np.empty(0, dtype=np.int64)
        return TokenSlots(nothing, nothing, nothing)

    @staticmethod
    def join(parts: list[TokenSlots]) -> TokenSlots:
        if not parts:
            return TokenSlots.none()
        return TokenSlots(
            np.concatenate([part.depths for part in parts]),
            np.concatenate([part.looped for part in parts]),
            np.concatenate([part.once for part in parts]),
        )


class SlotLists:
    """The settled tokens of one request: their slots, and the list of every depth."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        self._depths, self._looped, self._once = Growing(), Growing(), Growing()
        self._lists = [Growing() for _ in range(sight.lists)]

    def __len__(self) -> int:
        return len(self._depths)

    @property
    def once(self) -> Slots:
        return self._once.view

    def read_at(self, depth: int) -> Slots:
        """Slots of settled tokens that a later query at `depth` reads."""
        return self._lists[self.sight.list_of[depth]].view

    def append(self, tokens: TokenSlots) -> None:
        self._depths.extend(tokens.depths)
        self._looped.extend(tokens.looped)
        self._once.extend(tokens.once)
        if len(tokens) == 1:  # a decoded token; the general way takes several times as long
            depth = len(tokens.looped)
            for table, growing in zip(self.sight.earlier, self._lists, strict=True):
                growing.extend(tokens.looped[table[1 : depth + 1, depth]])
            return
        last = np.repeat(tokens.depths, tokens.depths)
        starts = np.repeat(tokens.depths.cumsum() - tokens.depths, tokens.depths)
        j = np.arange(len(last)) - starts + 1
        for table, growing in zip(self.sight.earlier, self._lists, strict=True):
            growing.extend(tokens.looped[table[j, last]])

    def tokens(self, start: int = 0, end: int | None = None) -> TokenSlots:
        whole = TokenSlots(self._depths.view, self._looped.view, self._once.view)
        part = whole.part(start, len(self) if end is None else end)
        return TokenSlots(part.depths.copy(), part.looped.copy(), part.once.copy())

    def replace(self, start: int, tokens: TokenSlots) -> SlotLists:
        """New lists in which `tokens` stand in for those from `start` on."""
        fresh = SlotLists(self.sight)
        fresh.append(TokenSlots.join([self.tokens(0, start), tokens, self.tokens(start + len(tokens))]))
        return fresh
