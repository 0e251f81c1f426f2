"""Tensor parallelism: several processes hold one model between them and run the same engine.

Every block is split as heads and MLP columns are: of R ranks, rank r owns query and key-value heads
[r H/R, (r+1) H/R) and its columns of the MLP. Output projections add up over ranks, so hidden states are whole
everywhere and everything outside the blocks runs on every rank alike; the LM head is split by vocabulary and gathered.
A block does not know that it is split: its linear layers are narrower, and two of them add up.

All ranks run one scheduler on the same requests. What could still come out differently - a gate's probability, a
drawn token, a seed, the room in memory - is rank 0's (for memory, the tightest rank's), so ranks never disagree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tah2.config.backbone import BackboneConfig
from tah2.config.strict import ConfigError
from tah2.engine.team import Team
from tah2.engine.weights import ModelWeights
from tah2.model.decoder import Block
from tah2.model.loop import LoopedDecoder


class SummedLinear(nn.Module):
    """Some input columns of a linear layer on every rank; the output is the sum over ranks, plus the bias once."""

    def __init__(self, linear: nn.Linear, columns: slice, team: Team) -> None:
        super().__init__()
        self.weight = _held(linear.weight[:, columns])
        self.bias = linear.bias
        self.team = team

    def forward(self, x: Tensor) -> Tensor:
        """x `[n, this rank's columns]` -> `[n, out]`, whole"""
        out = self.team.sum(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def shard(decoder: LoopedDecoder, team: Team) -> LoopedDecoder:
    """Keep this rank's part of the blocks and of an untied LM head, in place; the rest is let go."""
    refuse_uneven(decoder.backbone, team.size)
    for block in decoder.layers:
        assert isinstance(block, Block)
        _shard_block(block, decoder.backbone, team)
    if decoder.lm_head is not None:
        decoder.lm_head = _rows_of(decoder.lm_head, _vocabulary(decoder.backbone.vocab_size, team))
    return decoder


def refuse_uneven(backbone: BackboneConfig, size: int) -> None:
    parts = {
        "key-value heads": backbone.num_kv_heads,
        "query heads": backbone.num_heads,
        "MLP columns": backbone.intermediate_size,
    }
    for name, count in parts.items():
        if count % size:
            raise ConfigError(f"tensor_parallel_size={size} does not divide the model's {count} {name}; use a divisor.")


def _shard_block(block: Block, backbone: BackboneConfig, team: Team) -> None:
    attention, mlp, width = block.self_attn, block.mlp, backbone.head_dim
    query, kv = (_times(team.share(heads), width) for heads in (backbone.num_heads, backbone.num_kv_heads))
    columns = team.share(backbone.intermediate_size)
    attention.q_proj = _rows_of(attention.q_proj, query)
    attention.k_proj, attention.v_proj = _rows_of(attention.k_proj, kv), _rows_of(attention.v_proj, kv)
    mlp.gate_proj, mlp.up_proj = _rows_of(mlp.gate_proj, columns), _rows_of(mlp.up_proj, columns)
    attention.add_module("o_proj", SummedLinear(attention.o_proj, query, team))
    mlp.add_module("down_proj", SummedLinear(mlp.down_proj, columns, team))


def _rows_of(linear: nn.Linear, rows: slice) -> nn.Linear:
    """A linear layer of some outputs of another."""
    part = nn.Linear(linear.in_features, rows.stop - rows.start, bias=linear.bias is not None, device="meta")
    part.weight = _held(linear.weight[rows])
    if linear.bias is not None:
        part.bias = _held(linear.bias[rows])
    return part


def _held(part: Tensor) -> nn.Parameter:
    """A parameter of its own, so that the whole it was cut from can be let go."""
    return nn.Parameter(part.detach().clone(), requires_grad=False)


def _times(part: slice, width: int) -> slice:
    return slice(part.start * width, part.stop * width)


def _vocabulary(size: int, team: Team) -> slice:
    """This rank's tokens: equal parts, the last ones perhaps shorter or empty."""
    each = -(-size // team.size)
    return slice(min(team.rank * each, size), min((team.rank + 1) * each, size))


class ShardedWeights(ModelWeights):
    """A decoder that `shard` has cut, behind the runner's seam."""

    def __init__(self, decoder: LoopedDecoder, team: Team) -> None:
        super().__init__(decoder)
        self.team, self.vocabulary = team, decoder.backbone.vocab_size
        self.head_part = decoder.head_weight
        if decoder.lm_head is None:
            self.head_part = self.head_part[_vocabulary(self.vocabulary, team)]

    def head(self, state: Tensor) -> Tensor:
        each = -(-self.vocabulary // self.team.size)
        logits = F.linear(state, self.head_part)
        logits = F.pad(logits, (0, each - logits.shape[1]))
        return torch.cat(self.team.gather(logits), dim=1)[:, : self.vocabulary]

    def gate(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        return self.team.lead(super().gate(embedding, state, top_probabilities))
