"""Between Hugging Face's padded batches and flat tokens: the grid of one call, and the cache between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tah2.model.loop import Tokens
from tah2.model.store import LoopStore


class LoopCache:
    """Executed entries of earlier calls; one document per row of the batch."""

    is_compileable = False

    def __init__(self) -> None:
        self.store = LoopStore()
        self.columns = 0
        """Columns of `input_ids` seen so far, padding included."""
        self.lengths: Tensor | None = None
        """Real tokens of each row so far, long `[B]`."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b continues what row `beam_idx[b]` has executed (beam search)."""
        self.store = self.store.rows(beam_idx)
        if self.lengths is not None:
            self.lengths = self.lengths[beam_idx]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.lengths is not None:
            self.reorder_cache(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)


@dataclass(frozen=True)
class Grid:
    """Between `[B, T]` and flat tokens."""

    tokens: Tokens
    real: Tensor
    """bool `[B, T]`: this call's real (unpadded) tokens"""
    lengths: Tensor
    """long `[B]`: real tokens of each row up to and including this call"""

    @classmethod
    def of(
        cls, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: LoopCache | None
    ) -> Grid:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must have two dimensions (batch, tokens), not {input_ids.ndim}.")
        rows, columns = input_ids.shape
        real = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.ndim != 2:
                raise ValueError(
                    "Looped models take a padding mask [batch, tokens]; other attention masks are refused."
                )
            real = attention_mask[:, -columns:].bool()
        before = torch.zeros(rows, dtype=torch.long, device=input_ids.device)
        if cache is not None and cache.lengths is not None:
            before = cache.lengths.to(input_ids.device)
        position = before[:, None] + real.long().cumsum(1) - 1
        document = torch.arange(rows, device=input_ids.device)[:, None].expand(rows, columns)
        if position_ids is not None and (cache is None or cache.columns == 0):
            position = position_ids.expand(rows, columns)
            starts = (position == 0) & real
            document = document * columns + (starts.long().cumsum(1) - 1).clamp_min(0)
            if cache is not None and int(starts.sum(1).max()) > 1:
                raise ValueError("Several documents in one row (position_ids restarting at 0) cannot use a cache.")
            document = document if cache is None else document // columns
        return cls(Tokens(input_ids[real], document[real], position[real]), real, before + real.sum(1))

    def full(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Flat `[N, ...]` back to `[B, T, ...]`, `fill` at padding."""
        out = values.new_full((*self.real.shape, *values.shape[1:]), fill)
        out[self.real] = values
        return out

    def scatter(self, values: Tensor, keep: Tensor, fill: float = 0.0) -> Tensor:
        """Flat values of the kept tokens back to `[B, kept columns, ...]`."""
        columns = keep[0].nonzero().squeeze(-1)
        out = values.new_full((self.real.shape[0], len(columns), *values.shape[1:]), fill)
        out[self.real[:, columns]] = values
        return out


def kept_columns(input_ids: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """bool `[B, T]`: the same columns in every row, as transformers' `logits_to_keep` means it."""
    keep = torch.zeros_like(input_ids, dtype=torch.bool)
    if isinstance(logits_to_keep, Tensor):
        keep[:, logits_to_keep] = True
    else:
        keep[:, -logits_to_keep if logits_to_keep else 0 :] = True
    return keep
