"""How large the pools are: a memory budget turned into slots."""

from __future__ import annotations

import torch

from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.pool import KVPool, Pools
from tah2.engine.team import ALONE, Team
from tah2.model.loop import LoopedDecoder

CPU_GIB = 2.0


def make_pools(decoder: LoopedDecoder, config: EngineConfig, max_model_len: int, team: Team = ALONE) -> Pools:
    """Pools for `decoder`; never larger than what `max_num_seqs` requests of full length could fill.

    A team's ranks have equally many slots, each for its own key-value heads.
    """
    backbone, weight = decoder.backbone, decoder.embed_tokens.weight
    kv_heads = backbone.num_kv_heads // team.size
    per_layer = 2 * kv_heads * backbone.head_dim * weight.element_size()
    looped = len(decoder.looped)
    once = backbone.num_layers - looped
    tokens_per_slot = 1.0 if decoder.gate is not None else 1 / decoder.ceiling()
    """A gated loop may use as little as one entry per token, others always use them all."""
    slots = config.kv_slots
    if slots is None:
        budget = memory_budget(config, weight.device) - per_layer * (looped + once)  # the pools' spare slots
        most = config.max_num_seqs * max_model_len * decoder.ceiling()
        slots = team.least(min(int(budget // (per_layer * (looped + once * tokens_per_slot))), most))
    if slots < 1:
        raise ConfigError("The memory budget holds no key-value slot; raise kv_memory_gib.")

    def pool(layers: int, count: int) -> KVPool:
        return KVPool(layers, count, kv_heads, backbone.head_dim, weight.dtype, weight.device)

    return Pools(pool(looped, slots), pool(once, max(1, int(slots * tokens_per_slot))) if once else None)


def memory_budget(config: EngineConfig, device: torch.device) -> float:
    """Bytes that the pools may take."""
    if config.kv_memory_gib is not None:
        return config.kv_memory_gib * 2**30
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0.0, free - (1 - config.gpu_memory_utilization) * total)
    return CPU_GIB * 2**30
