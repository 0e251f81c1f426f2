"""Ragged attention as a few tiles of stock SDPA; memory linear in tokens, backward included.

Queries and keys are sorted by (document, position, depth). A *piece* is a run of queries of one document with the
contiguous range of keys that may matter to it: the document's keys up to the piece's last position. Long
documents are cut into pieces of at most `QUERIES` queries. A large piece is a *tile* of its own, which reads slices
of the sorted tensors and copies nothing; small pieces of similar size are padded to one tile.

Two cases per tile:
- plain causal (each query's keys are its own document's entries of the same pass up to itself): no mask at all;
- anything else: the rule's mask on the tile. All layers share the masks of a pass while they are small in total;
  above `KEPT_MASK_CELLS` a tile is recomputed in backward instead, so that neither masks nor scores are ever held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tah2.model.attention.order import reading_order
from tah2.visibility import Entries, Rule, visible

QUERIES = 256
SMALL_CELLS = 1 << 16
"""Pieces of fewer query-key cells are gathered and padded together."""
PADDED_CELLS = 1 << 18
"""Cells of one padded tile, at most."""
WASTE = 1.3
"""A padded tile may hold this many times the cells that its pieces need."""
KEPT_MASK_CELLS = 1 << 22
"""Masks of a pass with more cells than this are rebuilt when needed instead of kept."""


@dataclass
class TileMask:
    """The rule on one tile, as SDPA's additive mask `[batch, 1, queries, keys]`."""

    build: Callable[[], Tensor]
    keep: bool
    kept: Tensor | None = None

    def __call__(self, dtype: torch.dtype) -> Tensor:
        if self.kept is not None and self.kept.dtype == dtype:
            return self.kept
        allowed = self.build()
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
        if self.keep:
            self.kept = mask
        return mask


@dataclass(frozen=True)
class Tile:
    """One call of SDPA; ranges refer to sorted queries and keys."""

    queries: slice | Tensor
    """The queries of one piece, or padded rows of them, long `[batch, queries]`."""
    keys: slice | Tensor
    mask: TileMask | None
    """None for plain causal."""
    real: Tensor | None = None
    """long `[n]`: flat cells of padded `queries` that are real."""

    @property
    def rows(self) -> Tensor:
        """Sorted query numbers in the order of this tile's output, long `[n]`."""
        if isinstance(self.queries, slice):
            return torch.arange(self.queries.start, self.queries.stop)
        return self.queries.flatten()[self.real]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Sorted query, key and value `[N, heads, head_dim]` -> output of this tile's `rows`."""
        q, k, v = _take(query, self.queries), _take(key, self.keys), _take(value, self.keys)
        mask = None if self.mask is None else self.mask(q.dtype)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        flat = out.transpose(1, 2).flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)


def _take(x: Tensor, where: slice | Tensor) -> Tensor:
    """`[N, heads, d]` -> `[batch, heads, n, d]`; a slice is a view."""
    rows = x[where]
    return (rows[None] if isinstance(where, slice) else rows).transpose(1, 2)


@dataclass(frozen=True)
class TilePlan:
    tiles: list[Tile]
    query_order: Tensor | None
    """long `[queries]`, the sorted order; None where the entries come sorted."""
    key_order: Tensor | None
    output_order: Tensor
    """long `[queries]`: where each query's output lies in the tiles' concatenated outputs."""
    recomputes: bool
    """Backward recomputes each tile."""
    repeats_heads: bool = field(default=False)
    """Repeat key heads to the number of query heads, where SDPA's masked kernels cannot share them."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (
            x if order is None else x.index_select(0, order)
            for x, order in ((query, self.query_order), (key, self.key_order), (value, self.key_order))
        )
        if self.repeats_heads:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if self.recomputes and torch.is_grad_enabled():
            outputs = [
                checkpoint(tile.attend, query, key, value, use_reentrant=False, preserve_rng_state=False)
                for tile in self.tiles
            ]
        else:
            outputs = [tile.attend(query, key, value) for tile in self.tiles]
        return torch.cat(outputs).index_select(0, self.output_order)


class TileBackend:
    def plan(self, rule: Rule, query: Entries, key: Entries) -> TilePlan:
        device = query.position.device
        query_order, key_order = reading_order(query), reading_order(key)
        causal = is_plain_causal(rule, query, key)
        query, key = query[query_order], key[key_order]
        pieces = _pieces(query, key, whole_documents=causal)
        groups = _group(pieces)
        keeps = _cells(pieces, groups) <= KEPT_MASK_CELLS
        tiles = [_tile(rule, query, key, pieces[group], causal, keeps) for group in groups]
        rows = query_order[torch.cat([tile.rows.to(device) for tile in tiles])]
        return TilePlan(
            tiles,
            _unless_sorted(query_order),
            _unless_sorted(key_order),
            output_order=rows.argsort(),
            recomputes=not (causal or keeps),
            repeats_heads=device.type != "cpu",
        )


def _unless_sorted(order: Tensor) -> Tensor | None:
    return None if bool((order[1:] > order[:-1]).all()) else order


def is_plain_causal(rule: Rule, query: Entries, key: Entries) -> bool:
    """Queries and keys are the same entries, all at one depth, so that the rule is causality within documents."""
    if len(query) != len(key) or not rule.causal_within(int(query.depth[0])):
        return False
    same = (query.document == key.document) & (query.position == key.position) & (query.depth == key.depth)
    one_depth = (key.depth == key.depth[0]) & (key.last_depth == key.depth) & ~key.lookahead & ~query.lookahead
    return bool((same & one_depth).all())


def _pieces(query: Entries, key: Entries, whole_documents: bool) -> Tensor:
    """Rows (query start, query end, key start, key end) over sorted entries, long `[pieces, 4]` on the CPU."""
    documents, counts = query.document.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    key_starts = torch.searchsorted(key.document, documents)
    key_ends = torch.searchsorted(key.document, documents, right=True)
    table = torch.stack([ends - counts, ends, key_starts, key_ends], dim=1).cpu()
    if whole_documents or int(counts.max()) <= QUERIES:
        return table
    key_position, query_position = key.position.cpu(), query.position.cpu()
    rows = []
    for start, end, key_start, key_end in table.tolist():
        for first in range(start, end, QUERIES):
            last = min(first + QUERIES, end)
            reach = torch.searchsorted(key_position[key_start:key_end], query_position[last - 1], right=True)
            rows.append((first, last, key_start, key_start + int(reach)))
    return torch.tensor(rows)


def _group(pieces: Tensor) -> list[Tensor]:
    """Which pieces share a tile: large ones stand alone, small ones gather while padding stays small."""
    queries, keys = (pieces[:, 1] - pieces[:, 0]).tolist(), (pieces[:, 3] - pieces[:, 2]).tolist()
    order = sorted(range(len(queries)), key=lambda i: (keys[i], queries[i]), reverse=True)
    groups: list[list[int]] = []
    widest, real = 0, 0
    for i in order:
        cells = queries[i] * keys[i]
        if groups and real and cells < SMALL_CELLS:
            group = groups[-1]
            padded = (len(group) + 1) * max(widest, queries[i]) * keys[group[0]]
            if padded <= min(WASTE * (real + cells), PADDED_CELLS):
                group.append(i)
                widest, real = max(widest, queries[i]), real + cells
                continue
        groups.append([i])
        widest, real = queries[i], cells if cells < SMALL_CELLS else 0
    return [torch.tensor(group) for group in groups]


def _cells(pieces: Tensor, groups: list[Tensor]) -> int:
    """Query-key cells of all tiles, padding included."""
    sizes = pieces[:, [1, 3]] - pieces[:, [0, 2]]
    return sum(len(group) * int(sizes[group].amax(0).prod()) for group in groups)


def _tile(rule: Rule, query: Entries, key: Entries, pieces: Tensor, causal: bool, keep_mask: bool) -> Tile:
    """The tile of `pieces` over sorted entries."""
    if len(pieces) == 1:
        start, end, key_start, key_end = pieces[0].tolist()
        queries, keys = slice(start, end), slice(key_start, key_end)
        whole = TileMask(lambda: visible(rule, query[queries][:, None], key[keys][None])[None, None], keep_mask)
        return Tile(queries, keys, None if causal else whole)
    device = query.position.device
    query_index, query_real = _padded_ranges(pieces[:, 0], pieces[:, 1], device)
    key_index, key_real = _padded_ranges(pieces[:, 2], pieces[:, 3], device)

    def build() -> Tensor:
        allowed = visible(rule, query[query_index][:, :, None], key[key_index][:, None, :]) & key_real[:, None, :]
        allowed[:, :, 0] |= ~query_real  # a padded query reads something, so that no softmax row is empty
        return allowed[:, None]

    mask = None if causal else TileMask(build, keep_mask)
    return Tile(query_index, key_index, mask, real=query_real.flatten().nonzero().squeeze(-1))


def _padded_ranges(starts: Tensor, ends: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranges [start, end) as rows padded with 0, and which cells are real; both `[rows, longest]`."""
    steps = torch.arange(int((ends - starts).max()))
    index = starts[:, None] + steps[None, :]
    real = index < ends[:, None]
    return torch.where(real, index, 0).to(device), real.to(device)
