"""Teacher-forced scoring and prefill: full logits of the mixed distribution for chosen tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.model.loop import LoopedDecoder, LoopRun, LoopSettings, Tokens
from tah2.model.output import DepthLogits, mix
from tah2.model.reentry import Predicted
from tah2.model.store import LoopStore

HEAD_ROWS = 256
"""Rows of the LM head product where only the most probable tokens are wanted."""


@dataclass
class LogitsReader:
    """Keeps full logits where `kept` names a row, and the most probable tokens everywhere."""

    weight: Tensor
    kept: Tensor
    """long `[N]`: the kept-token number of each token, or -1"""
    every_depth: bool = False

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> DepthLogits:
        rows = self.kept[index]
        chosen = rows >= 0
        logits = F.linear(state[chosen], self.weight)
        if top_k == 0:
            return DepthLogits(rows[chosen], chosen, logits)
        tokens = torch.empty(len(index), top_k, dtype=torch.long, device=state.device)
        probabilities = torch.empty(len(index), top_k, dtype=torch.float32, device=state.device)
        tokens[chosen], probabilities[chosen] = most_probable(logits, top_k)
        for part in (~chosen).nonzero().squeeze(-1).split(HEAD_ROWS):
            tokens[part], probabilities[part] = most_probable(F.linear(state[part], self.weight), top_k)
        return DepthLogits(rows[chosen], chosen, logits, Predicted(tokens, probabilities))


def most_probable(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Token ids and fp32 probabilities of the `top_k` most probable tokens, `[n, top_k]`, descending."""
    probabilities, tokens = logits.detach().float().softmax(-1).topk(top_k, dim=-1)
    return tokens, probabilities


@dataclass
class Scores:
    logits: Tensor
    """fp32 `[kept, vocabulary]`: see `output.mix`"""
    run: LoopRun

    @property
    def depths(self) -> Tensor:
        """long `[N]`: iterations that each token executed"""
        return self.run.executed


def score(
    decoder: LoopedDecoder,
    tokens: Tokens,
    keep: Tensor | None = None,
    settings: LoopSettings | None = None,
    store: LoopStore | None = None,
    every_depth: bool = False,
) -> Scores:
    """Run the loop over packed tokens and mix; `keep` `[N]` bool chooses whose logits are wanted (all by default)."""
    keep = torch.ones_like(tokens.ids, dtype=torch.bool) if keep is None else keep
    count = int(keep.sum())
    kept = torch.where(keep, keep.cumsum(0) - 1, -1)
    reader = LogitsReader(decoder.head_weight, kept, every_depth)
    run = decoder(tokens, reader, settings, store)
    if all(isinstance(current.reading, DepthLogits) for current in run.passes):
        return Scores(mix(decoder.kind.output, run, count), run)
    return Scores(F.linear(run.final_state[keep], decoder.head_weight).float(), run)
