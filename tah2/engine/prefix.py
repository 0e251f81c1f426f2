"""The prefix cache: a radix tree over token ids whose nodes own the ragged slots of all depths.

A node holds a run of tokens, the depths they executed and every slot of these entries. Requests lock the path from
the root to the deepest node that they read; what nobody locks may be evicted, least recently used leaves first.
Trees are kept apart by what changes keys and values: the weights, the depth ceiling and the exit threshold.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tah2.engine.pool import Pools, Slots
from tah2.engine.slots import TokenSlots

Ids = NDArray[np.int64]


@dataclass(eq=False)
class Node:
    ids: Ids
    tokens: TokenSlots
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    """By first token."""
    locks: int = 0
    """Requests that read this node or a descendant."""
    used: int = 0

    def path(self) -> list[Node]:
        """From below the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Match:
    node: Node
    """The deepest node of the match; the tree's root where nothing matched."""
    tokens: TokenSlots

    def __len__(self) -> int:
        return len(self.tokens)


class PrefixCache:
    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self.idle_looped = 0
        self.idle_once = 0
        """Slots of nodes that nobody locks: what eviction can free."""

    def match(self, key: Hashable, ids: Ids) -> Match:
        """The longest cached prefix of `ids`; a node that only begins like them is split there."""
        node = self._roots.setdefault(key, Node(ids[:0], TokenSlots.none(), None))
        parts, seen = [], 0
        while seen < len(ids):
            child = node.children.get(int(ids[seen]))
            if child is None:
                break
            shared = common_prefix(child.ids, ids[seen:])
            node = self._split(child, shared) if shared < len(child.ids) else child
            node.used = self._tick()
            parts.append(node.tokens)
            seen += shared
        return Match(node, TokenSlots.join(parts))

    def matched(self, key: Hashable, ids: Ids) -> int:
        """The length of the longest cached prefix; changes nothing."""
        node, seen = self._roots.get(key), 0
        while node is not None and seen < len(ids):
            child = node.children.get(int(ids[seen]))
            if child is None:
                break
            shared = common_prefix(child.ids, ids[seen:])
            seen += shared
            node = child if shared == len(child.ids) else None
        return seen

    def insert(self, below: Node, ids: Ids, tokens: TokenSlots) -> Match:
        """Add a continuation of `below`.

        Returns the deepest node and the slots that the tree already had for the first tokens: the caller's slots for
        these stay the caller's, all others are the tree's from now on.
        """
        node, seen, known = below, 0, []
        while seen < len(ids) and (child := node.children.get(int(ids[seen]))) is not None:
            shared = common_prefix(child.ids, ids[seen:])
            node = self._split(child, shared) if shared < len(child.ids) else child
            node.used = self._tick()
            known.append(node.tokens)
            seen += shared
        if seen < len(ids):
            rest = tokens.part(seen, len(ids))
            fresh = Node(ids[seen:].copy(), rest, node, used=self._tick())
            node.children[int(ids[seen])] = fresh
            self._count_idle(fresh, 1)
            node = fresh
        return Match(node, TokenSlots.join(known))

    def lock(self, node: Node) -> None:
        for step in node.path():
            if step.locks == 0:
                self._count_idle(step, -1)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        for step in node.path():
            step.locks -= 1
            if step.locks == 0:
                self._count_idle(step, 1)

    def evict(self, looped: int, once: int) -> None:
        """Free nodes that nobody reads until the pools have this much room, or nothing is left to free."""
        leaves = [(node.used, id(node), node) for node in self.nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        while leaves and not self.pools.room(looped, once):
            node = heapq.heappop(leaves)[2]
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.ids[0])]
            self._count_idle(node, -1)
            self.pools.give(node.tokens.looped.tolist(), node.tokens.once.tolist())
            if not parent.children and not parent.locks and parent.parent is not None:
                heapq.heappush(leaves, (parent.used, id(parent), parent))

    def clear(self) -> None:
        """Free every node that nobody reads."""
        self.evict(self.pools.looped.slots.capacity + 1, 0)

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def owned(self) -> tuple[list[Slots], list[Slots]]:
        """Slots of all nodes: looped, once."""
        nodes = list(self.nodes())
        return [node.tokens.looped for node in nodes], [node.tokens.once for node in nodes]

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two and return the upper part; locks of the lower part hold the upper one too."""
        assert node.parent is not None
        upper = Node(node.ids[:at], node.tokens.part(0, at), node.parent, locks=node.locks, used=node.used)
        node.parent.children[int(node.ids[0])] = upper
        upper.children[int(node.ids[at])] = node
        node.ids, node.tokens, node.parent = node.ids[at:], node.tokens.part(at, len(node.tokens)), upper
        return upper

    def _count_idle(self, node: Node, sign: int) -> None:
        self.idle_looped += sign * len(node.tokens.looped)
        self.idle_once += sign * len(node.tokens.once)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def common_prefix(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
