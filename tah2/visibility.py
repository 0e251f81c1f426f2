"""Who sees whom: the only place that says which keys an entry reads.

An *entry* is (document, position, depth): one token at one iteration. A query entry (t, m) may read a
key entry (s, j) of the same document. A rule states two small predicates,

    earlier(j, m, last)   for keys of earlier tokens, s < t, where `last` is the key token's executed depth
    own(j, m)             for keys of the same token, s = t

and everything else derives from them: the dense mask, FlexAttention's `mask_mod`, the slot lists of the
engine and the visible-key counts of the compute accounting. The predicates use only comparisons, `&`, `|`
and arithmetic that numbers and tensors share.

A *lookahead* entry is a training-time probe: a stopped token run once more without gradient. Its query
follows its rule over executed entries; its key is visible to itself alone, under every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Predicate = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """One visibility rule; `summary` is its line in tables and pictures."""

    name: str
    summary: str
    earlier: Callable[[Any, Any, Any], Any]
    own: Callable[[Any, Any], Any]

    def causal_within(self, depth: int) -> bool:
        """Among entries of this depth alone, (t, m) reads exactly the (s, m) of s <= t."""
        return bool(self.earlier(depth, depth, depth)) and bool(self.own(depth, depth))

    def reads_depth(self, j: int, m: int) -> bool:
        """May any query at depth m read any key of depth j?"""
        return bool(self.own(j, m)) or any(self.earlier(j, m, last) for last in range(j, max(j, m) + 1))


def _minimum(a: Any, b: Any) -> Any:
    """min(a, b) for numbers and tensors alike, without branching on values."""
    return a * (a <= b) + b * (b < a)


DUO_CAUSAL = Rule(
    "duo-causal",
    "s <= t and j <= m, executed entries",
    earlier=lambda j, m, last: j <= m,
    own=lambda j, m: j <= m,
)
BASE_STREAM = Rule(
    "base-stream",
    "(s < t and j = 1) or (s = t and j <= m)",
    earlier=lambda j, m, last: j == 1,
    own=lambda j, m: j <= m,
)
PER_ITERATION = Rule(
    "per-iteration",
    "s <= t and j = m",
    earlier=lambda j, m, last: j == m,
    own=lambda j, m: j == m,
)
LAST_EXITED = Rule(
    "last-exited",
    "s <= t and j = min(m_s, m)",
    earlier=lambda j, m, last: j == _minimum(last, m),
    own=lambda j, m: j == m,
)
RULES: dict[str, Rule] = {rule.name: rule for rule in (DUO_CAUSAL, BASE_STREAM, PER_ITERATION, LAST_EXITED)}


@dataclass(frozen=True)
class Entries:
    """Flat, ragged entries; every field is a long tensor `[N]` (bool for `lookahead`)."""

    document: Tensor
    position: Tensor
    depth: Tensor
    last_depth: Tensor
    """Depths that the entry's token has executed so far (its m_s, as far as a pass can know it)."""
    lookahead: Tensor

    @classmethod
    def of(
        cls,
        document: Tensor,
        position: Tensor,
        depth: int | Tensor,
        last_depth: Tensor | None = None,
        lookahead: bool | Tensor = False,
    ) -> Entries:
        depth = torch.full_like(position, depth) if isinstance(depth, int) else depth
        if isinstance(lookahead, bool):
            lookahead = torch.full_like(position, lookahead, dtype=torch.bool)
        return cls(document, position, depth, depth if last_depth is None else last_depth, lookahead)

    def __len__(self) -> int:
        return self.position.numel()

    def fields(self) -> tuple[Tensor, ...]:
        return self.document, self.position, self.depth, self.last_depth, self.lookahead

    def __getitem__(self, index: Any) -> Entries:
        return Entries(*(field[index] for field in self.fields()))

    @staticmethod
    def cat(parts: Sequence[Entries]) -> Entries:
        if len(parts) == 1:
            return parts[0]
        return Entries(*(torch.cat(column) for column in zip(*(part.fields() for part in parts), strict=True)))


def visible(rule: Rule, query: Entries, key: Entries) -> Tensor:
    """May query i read key k? Fields of `query` and `key` broadcast against each other; returns bool."""
    same_token = key.position == query.position
    own_probe = same_token & (key.depth <= query.depth) & query.lookahead
    by_rule = ((key.position < query.position) & rule.earlier(key.depth, query.depth, key.last_depth)) | (
        same_token & rule.own(key.depth, query.depth)
    )
    return (key.document == query.document) & torch.where(key.lookahead, own_probe & by_rule, by_rule)


def dense_mask(rule: Rule, query: Entries, key: Entries) -> Tensor:
    """The reference: bool `[queries, keys]`."""
    return visible(rule, query[:, None], key[None, :])


def mask_mod(rule: Rule, query: Entries, key: Entries) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as FlexAttention's `mask_mod(batch, head, query_index, key_index)`.

    The closure holds plain tensors, so that a compiled caller sees them as inputs and compiles once per rule.
    """
    queries, keys = query.fields(), key.fields()

    def mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(rule, Entries(*(field[q] for field in queries)), Entries(*(field[k] for field in keys)))

    return mod


def keys_of_earlier_token(rule: Rule, executed: Any, depth: int, max_depth: int) -> Any:
    """How many keys a query at `depth` reads from one earlier token of `executed` depths (number or tensor)."""
    return sum((executed >= j) * (rule.earlier(j, depth, executed) * 1) for j in range(1, max_depth + 1))


def keys_of_own_token(rule: Rule, depth: int) -> int:
    """How many of its own entries a query at `depth` reads, itself included."""
    return sum(int(rule.own(j, depth)) for j in range(1, depth + 1))


def visible_key_counts(rule: Rule, executed: Tensor, depth: int, max_depth: int) -> Tensor:
    """S for a query of every token of one document at `depth`, as if each token reached it: long `[T]`.

    `executed` `[T]` holds the depths that the document's tokens executed, in order of position.
    """
    each = keys_of_earlier_token(rule, executed, depth, max_depth) + torch.zeros_like(executed)
    return each.cumsum(0) - each + keys_of_own_token(rule, depth)


def slot_list(rule: Rule, executed: Sequence[int], depth: int) -> list[tuple[int, int]]:
    """Keys of one document that a *next* token at `depth` reads: (position, depth) ordered by position, depth.

    Appending the next token's own entries (those `rule.own` names) completes its list.
    """
    return [
        (position, j)
        for position, last in enumerate(executed)
        for j in range(1, last + 1)
        if rule.earlier(j, depth, last)
    ]
