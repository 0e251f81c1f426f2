"""A tiny TaH2 decoder, batches shared by two ranks, and a loss that uses everything a pass produces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.gate import Gate
from tah2.model.loop import LoopedDecoder, LoopRun, LoopSettings, Tokens
from tah2.model.reentry import Predicted
from tah2.objective.head import read_head
from tah2.train.parallel import RankPeers, World

VOCABULARY = 24
DEEP, DEEPER = 12, 5
"""Tokens below `DEEP` continue after depth 1, below `DEEPER` also after depth 2."""
RANKS: list[list[list[range]]] = [
    [[range(9), range(3, 14)], [range(12, 20)]],
    [[range(12, 24)], [range(1, 8), range(10, 15)]],
]
"""Documents by rank and micro-batch: in the first, rank 1 has nothing that continues; in the second, rank 0."""
TOKENS = sum(len(document) for rank in RANKS for batch in rank for document in batch)


LOOP = LoopConfig("tah2", 3, updater_width=6, decider_width=6, decider_top_k=4)


def backbone(tied: bool) -> BackboneConfig:
    return BackboneConfig("qwen3", VOCABULARY, 8, 12, 2, 2, 1, 4, tie_word_embeddings=tied, qk_norm=True)


def tiny_decoder(tied: bool, seed: int = 0) -> LoopedDecoder:
    torch.manual_seed(seed)
    decoder = LoopedDecoder(backbone(tied), LOOP)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return decoder


@dataclass
class Read:
    loss: Tensor
    predicted: Predicted | None


class Reader:
    every_depth = True

    def __init__(self, weight: Tensor, targets: Tensor) -> None:
        self.weight, self.targets = weight, targets

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> Read:
        reading = read_head(state, self.weight, self.targets[index], top_k=top_k)
        return Read(-reading.target_logprob, Predicted(reading.top_tokens, reading.top_probs) if top_k else None)


def run_batch(
    decoder: LoopedDecoder, documents: list[range], world: World, checkpoint: bool = False
) -> tuple[Tokens, Tensor, LoopRun]:
    """Tokens and targets, long `[N]`, of the documents, and their run with a lookahead for every token."""
    tokens = Tokens.pack([torch.arange(d.start, d.stop) for d in documents])
    targets = (tokens.ids * 7 + 3) % VOCABULARY

    def route(gate: Gate, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading: Any) -> Tensor:
        return tokens.ids[index] < (DEEP if depth == 1 else DEEPER)

    everyone = torch.ones_like(tokens.ids, dtype=torch.bool)
    settings = LoopSettings(route, lookahead=everyone, checkpoint=checkpoint, peers=RankPeers(world))
    return tokens, targets, decoder(tokens, Reader(decoder.head_weight, targets), settings)


def gate_loss(decoder: LoopedDecoder, documents: list[range], world: World) -> Tensor:
    """Nothing but the gate has a part in it."""
    _, _, run = run_batch(decoder, documents, world)
    logits = [current.continue_logit for current in run.passes if current.continue_logit is not None]
    return run.idle.float() + sum(logit.square().sum() for logit in logits) / TOKENS


def batch_loss(decoder: LoopedDecoder, documents: list[range], world: World, checkpoint: bool = False) -> Tensor:
    """Head inside and after the forward, weights from lookaheads, and no gate in the graph where none goes on."""
    tokens, targets, run = run_batch(decoder, documents, world, checkpoint)
    loss = run.idle.float() - read_head(run.final_state, decoder.head_weight, targets).target_logprob.sum()
    next_loss = torch.zeros(len(tokens))
    for probe in run.lookaheads:
        next_loss[probe.index] = probe.reading.loss
    for current in run.passes:
        gain_weight = 1 + next_loss[current.index]
        loss = loss + (current.depth * gain_weight * current.reading.loss).sum()
        deep = tokens.ids[current.index] < DEEP
        if current.continue_logit is not None and bool(deep.any()):
            loss = loss + (current.continue_logit * gain_weight)[deep].sum()
    return loss / TOKENS
