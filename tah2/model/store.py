"""Keys and values of executed entries, kept per layer span between passes and between calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tah2.visibility import Entries, Rule


@dataclass
class SpanStore:
    """What one span of layers (prelude, looped layers or coda) has executed so far.

    `pieces` hold one pass each, in order; a layer's piece is key and value `[N_pass, kv_heads, head_dim]`.
    """

    entries: list[Entries] = field(default_factory=list)
    tokens: list[Tensor | None] = field(default_factory=list)
    """Indices of the piece's entries in the current call's tokens; None for entries of earlier calls."""
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)

    def add(self, entries: Entries, tokens: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        self.entries.append(entries)
        self.tokens.append(tokens)
        self.keys.append(keys)
        self.values.append(values)

    def copy(self) -> SpanStore:
        """The same pieces; what is added to one is not in the other."""
        return SpanStore(list(self.entries), list(self.tokens), list(self.keys), list(self.values))

    def readable(self, rule: Rule, depth: int) -> list[int]:
        """Pieces of which a query at `depth` may read anything: other depths' passes need not be looked at.

        A piece of an earlier call holds many depths and is always readable.
        """
        return [
            piece
            for piece, (entries, tokens) in enumerate(zip(self.entries, self.tokens, strict=True))
            if tokens is None or rule.reads_depth(int(entries.depth[0]), depth)
        ]

    def past(self, layer: int, pieces: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        """A layer's keys and values of `pieces`, in order."""
        return [self.keys[piece][layer] for piece in pieces], [self.values[piece][layer] for piece in pieces]

    def seen(self, executed: Tensor, pieces: list[int]) -> list[Entries]:
        """Entries of `pieces` with `last_depth` brought up to date from this call's executed depths `[tokens]`."""
        fresh = []
        for piece in pieces:
            entries, tokens = self.entries[piece], self.tokens[piece]
            if tokens is not None:
                last = executed[tokens]
                entries = Entries(entries.document, entries.position, entries.depth, last, entries.lookahead)
            fresh.append(entries)
        return fresh

    def settled(self, executed: Tensor) -> SpanStore:
        """The store after a call: one merged piece whose entries no longer refer to the call's tokens."""
        if not self.entries:
            return SpanStore()
        layers = range(len(self.keys[0]))
        return SpanStore(
            entries=[Entries.cat(self.seen(executed, list(range(len(self.entries)))))],
            tokens=[None],
            keys=[[torch.cat([piece[layer] for piece in self.keys]).detach() for layer in layers]],
            values=[[torch.cat([piece[layer] for piece in self.values]).detach() for layer in layers]],
        )

    def select(self, index: Tensor, document: Tensor) -> SpanStore:
        """A settled store's entries `index`, renamed to `document`."""
        if not self.entries:
            return SpanStore()
        old = self.entries[0][index]
        entries = Entries(document, old.position, old.depth, old.last_depth, old.lookahead)
        return SpanStore(
            entries=[entries],
            tokens=[None],
            keys=[[key.index_select(0, index) for key in self.keys[0]]],
            values=[[value.index_select(0, index) for value in self.values[0]]],
        )


@dataclass
class LoopStore:
    """The three spans of a looped stack; prelude and coda stay empty where the whole stack loops."""

    prelude: SpanStore = field(default_factory=SpanStore)
    looped: SpanStore = field(default_factory=SpanStore)
    coda: SpanStore = field(default_factory=SpanStore)

    def copy(self) -> LoopStore:
        return LoopStore(self.prelude.copy(), self.looped.copy(), self.coda.copy())

    @property
    def is_settled(self) -> bool:
        """No piece refers to the tokens of a call, so a next call may build on it."""
        return all(tokens is None for span in (self.prelude, self.looped, self.coda) for tokens in span.tokens)

    def settled(self, executed: Tensor) -> LoopStore:
        once = torch.ones_like(executed)
        return LoopStore(self.prelude.settled(once), self.looped.settled(executed), self.coda.settled(once))

    def rows(self, order: Tensor) -> LoopStore:
        """A settled store whose document b is a copy of document `order[b]`."""
        return LoopStore(*(_rows(span, order) for span in (self.prelude, self.looped, self.coda)))


def _rows(span: SpanStore, order: Tensor) -> SpanStore:
    if not span.entries:
        return SpanStore()
    document = span.entries[0].document
    matches = (document[None, :] == order.to(document.device)[:, None]).nonzero()
    return span.select(matches[:, 1], matches[:, 0])
