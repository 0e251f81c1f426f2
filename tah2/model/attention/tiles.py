"""Ragged attention as a few padded tiles of stock SDPA; memory linear in tokens, backward included.

Queries and keys are sorted by (document, position, depth). A *piece* is a run of queries of one document with
the contiguous range of keys that may matter to it: the document's keys up to the piece's last position. Long
documents are cut into pieces of at most `QUERIES` queries, so a piece's mask stays small; short documents are
batched, pieces of similar size padded to one *tile* `[batch, queries] x [batch, keys]`.

Two cases per tile:
- plain causal (each query's keys are its own document's entries of the same pass up to itself): no mask at all;
- anything else: the rule's mask on the tile, rebuilt in backward where keeping all masks would cost memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tah2.visibility import Entries, Rule, visible

QUERIES = 256
PADDED_CELLS = 1 << 20
"""Query-key cells of one batched tile, at most (one long piece may exceed it)."""
WASTE = 1.3
"""A tile may hold this many times the cells that its pieces need."""
KEPT_MASK_CELLS = 1 << 25
"""Above this many mask cells in a plan, masks are rebuilt when needed instead of kept (32 MiB as bool)."""


@dataclass(frozen=True)
class Tile:
    query_index: Tensor
    """long `[batch, queries]` into the pass's queries; padding repeats index 0"""
    key_index: Tensor
    """long `[batch, keys]` into the pass's keys; padding repeats index 0"""
    query_rows: Tensor
    """long `[n]`: flat cells of `query_index` that are real"""
    key_length: Tensor
    """long `[batch]`: real keys of each row"""
    mask: Callable[[], Tensor] | None
    """bool `[batch, 1, queries, keys]`; None for plain causal"""


@dataclass(frozen=True)
class TilePlan:
    tiles: list[Tile]
    output_order: Tensor
    """long `[queries]`: where each query's output lies in the concatenated real rows of the tiles"""
    keeps_masks: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for tile in self.tiles:
            if tile.mask is None or self.keeps_masks or not torch.is_grad_enabled():
                outputs.append(_attend_tile(tile, query, key, value))
            else:
                outputs.append(checkpoint(_attend_tile, tile, query, key, value, use_reentrant=False))
        return torch.cat(outputs).index_select(0, self.output_order)


def _attend_tile(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, queries = tile.query_index.shape
    heads, width = query.shape[1:]
    repeats = heads // key.shape[1]
    q = query[tile.query_index].transpose(1, 2)
    k = key[tile.key_index].transpose(1, 2).repeat_interleave(repeats, dim=1)
    v = value[tile.key_index].transpose(1, 2).repeat_interleave(repeats, dim=1)
    mask = None if tile.mask is None else tile.mask()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).reshape(batch * queries, heads, width).index_select(0, tile.query_rows)


class TileBackend:
    def plan(self, rule: Rule, query: Entries, key: Entries) -> TilePlan:
        query_order, key_order = _order(query), _order(key)
        causal = _is_plain_causal(rule, query, key)
        pieces = _pieces(query[query_order], key[key_order], whole_documents=causal)
        groups = _group(pieces)
        cells = sum(
            len(g) * int((pieces[g, 1] - pieces[g, 0]).max() * (pieces[g, 3] - pieces[g, 2]).max()) for g in groups
        )
        keeps_masks = cells <= KEPT_MASK_CELLS
        tiles = [
            _tile(rule, query, key, query_order, key_order, pieces[group], causal, keeps_masks) for group in groups
        ]
        real = torch.cat([tile.query_index.flatten()[tile.query_rows] for tile in tiles])
        output_order = torch.empty_like(real)
        output_order[real] = torch.arange(real.numel(), device=real.device)
        return TilePlan(tiles, output_order, keeps_masks)


def _order(entries: Entries) -> Tensor:
    """Indices that sort entries by (document, position, depth)."""
    if len(entries) == 0:
        return entries.position
    stride = int(entries.depth.max()) + 1
    places = entries.position * stride + entries.depth
    return (entries.document * (int(places.max()) + 1) + places).argsort(stable=True)


def _is_plain_causal(rule: Rule, query: Entries, key: Entries) -> bool:
    """Queries and keys are the same entries, whole documents from their first key on, all at one depth."""
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
    positions = key.position.cpu()
    query_positions = query.position.cpu()
    rows = []
    for start, end, key_start, key_end in table.tolist():
        for first in range(start, end, QUERIES):
            last = min(first + QUERIES, end)
            document_keys = positions[key_start:key_end]
            reach = int(torch.searchsorted(document_keys, query_positions[last - 1], right=True))
            rows.append((first, last, key_start, key_start + reach))
    return torch.tensor(rows)


def _group(pieces: Tensor) -> list[Tensor]:
    """Gather pieces of similar size: padded cells stay within `WASTE` of the real ones and `PADDED_CELLS`."""
    queries, keys = (pieces[:, 1] - pieces[:, 0]).tolist(), (pieces[:, 3] - pieces[:, 2]).tolist()
    order = sorted(range(len(queries)), key=lambda i: (keys[i], queries[i]), reverse=True)
    groups: list[list[int]] = []
    widest, real = 0, 0
    for i in order:
        cells = queries[i] * keys[i]
        if groups:
            group = groups[-1]
            padded = (len(group) + 1) * max(widest, queries[i]) * keys[group[0]]
            if padded <= min(WASTE * (real + cells), PADDED_CELLS):
                group.append(i)
                widest, real = max(widest, queries[i]), real + cells
                continue
        groups.append([i])
        widest, real = queries[i], cells
    return [torch.tensor(group) for group in groups]


def _tile(
    rule: Rule,
    query: Entries,
    key: Entries,
    query_order: Tensor,
    key_order: Tensor,
    pieces: Tensor,
    causal: bool,
    keep_mask: bool,
) -> Tile:
    device = query_order.device
    query_index, query_real = _padded_ranges(pieces[:, 0], pieces[:, 1], device)
    key_index, key_real = _padded_ranges(pieces[:, 2], pieces[:, 3], device)
    query_index, key_index = query_order[query_index], key_order[key_index]

    def build() -> Tensor:
        allowed = visible(rule, query[query_index][:, :, None], key[key_index][:, None, :]) & key_real[:, None, :]
        allowed[:, :, 0] |= ~query_real  # a padded query reads something, so that no softmax row is empty
        return allowed[:, None]

    mask: Callable[[], Tensor] | None = None if causal else build
    if mask is not None and keep_mask:
        kept = build()
        mask = lambda: kept
    return Tile(query_index, key_index, query_real.flatten().nonzero().squeeze(-1), key_real.sum(-1), mask)


def _padded_ranges(starts: Tensor, ends: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranges [start, end) as rows padded with 0, and which cells are real; both `[rows, longest]`."""
    steps = torch.arange(int((ends - starts).max()))
    index = starts[:, None] + steps[None, :]
    real = index < ends[:, None]
    return torch.where(real, index, 0).to(device), real.to(device)
