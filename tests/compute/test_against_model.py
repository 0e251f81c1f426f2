"""The accounting against the model itself: every linear map that a run multiplies is counted while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tah2.compute import TrainCounts, Work, per_call
from tah2.compute.percall import forward, inference_head_every_depth
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.kinds import LOOP_KINDS
from tah2.model.loop import LoopedDecoder, LoopSettings, Tokens
from tah2.model.reentry import Predicted

TINY = BackboneConfig("qwen3", 11, 8, 10, 5, 3, 1, 4, qk_norm=True)


@dataclass
class CountingReader:
    """Stands in for the LM head and counts the tokens that it reads."""

    every_depth: bool = False
    read_tokens: int = 0
    predicted: Predicted | None = field(default=None)

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> CountingReader:
        self.read_tokens += len(index)
        shape = (len(index), top_k)
        predicted = Predicted(torch.zeros(shape, dtype=torch.long), torch.full(shape, 0.1)) if top_k else None
        return CountingReader(predicted=predicted)


def multiplied(modules: Any, run: Any) -> int:
    """FLOPs of every `nn.Linear` below `modules` while `run` runs."""
    flops = 0

    def count(linear: nn.Linear, arguments: tuple[Tensor], output: Tensor) -> None:
        nonlocal flops
        flops += 2 * linear.in_features * linear.out_features * (arguments[0].numel() // linear.in_features)

    linears = [part for module in modules for part in module.modules() if isinstance(part, nn.Linear)]
    handles = [linear.register_forward_hook(count) for linear in linears]
    run()
    for handle in handles:
        handle.remove()
    return flops


@pytest.mark.parametrize("kind", sorted(LOOP_KINDS))
def test_a_run_multiplies_what_the_accounting_says(kind: str):
    loop = LoopConfig(kind, 3, updater_width=5, decider_width=6, decider_top_k=4)
    model = LoopedDecoder(TINY, loop)
    model.reset()
    depths = torch.tensor([1, 3, 2, 1, 3, 1, 2])
    tokens = Tokens.pack([torch.arange(4), torch.arange(3)])
    reader = CountingReader()

    def route(gate: Any, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading: Any) -> Tensor:
        return depths[index] > depth

    parts = [*model.layers, model.reentry, *([] if model.gate is None else [model.gate])]
    runs = []
    with torch.no_grad():
        flops = multiplied(parts, lambda: runs.append(model(tokens, reader, LoopSettings(router=route))))
    executed = runs[0].executed
    ceiling = model.ceiling()
    assert executed.tolist() == (depths.tolist() if model.gate is not None else [ceiling] * len(depths))

    price, every_depth = per_call(TINY, loop), inference_head_every_depth(model.kind, TINY, loop)
    counts = TrainCounts.of(model.kind.rule, tokens.document, executed, ceiling)
    cost = forward(price, Work(counts.tokens, counts.pairs, counts.once), every_depth)
    assert flops == cost.backbone + cost.reentry + cost.gate
    if every_depth:
        assert cost.head == reader.read_tokens * price.head
    else:
        assert reader.read_tokens == 0, "the caller reads the final state, once per token"
        assert cost.head == len(tokens) * price.head
