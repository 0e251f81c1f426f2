"""How many slots a memory budget buys."""

from __future__ import annotations

import pytest
import torch

from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.memory import CPU_GIB, make_pools, memory_budget
from tah2.engine.pool import KVPool
from tests.engine.tiny import BACKBONE, model


def held(pool: KVPool | None) -> int:
    """Bytes of a pool."""
    return 0 if pool is None else pool.keys.nbytes + pool.values.nbytes


@pytest.mark.parametrize("kind", ["standard", "tah2-4", "ouro-adaptive", "huginn"])
def test_pools_take_the_budget_and_no_more(kind: str):
    pools = make_pools(model(kind), EngineConfig(kv_memory_gib=2**-11), 10_000)
    slot = 2 * BACKBONE.num_layers * BACKBONE.kv_width * 4
    taken = held(pools.looped) + held(pools.once)
    assert 2**19 - 2 * slot < taken <= 2**19
    assert (pools.once is None) == (kind != "huginn")


def test_layers_that_run_once_need_fewer_slots():
    pools = make_pools(model("huginn"), EngineConfig(kv_slots=30), 10_000)
    assert pools.once is not None
    assert (pools.looped.slots.capacity, pools.once.slots.capacity) == (30, 10)


def test_pools_are_never_larger_than_all_requests_at_full_length():
    pools = make_pools(model("tah2-4"), EngineConfig(max_num_seqs=3), 20)
    assert pools.looped.slots.capacity == 3 * 20 * 4


def test_a_budget_without_a_slot_is_refused():
    with pytest.raises(ConfigError, match="raise kv_memory_gib"):
        make_pools(model("tah2-4"), EngineConfig(kv_memory_gib=1e-9), 20)


def test_the_budget_is_what_was_asked_or_what_the_device_leaves(monkeypatch: pytest.MonkeyPatch):
    gpu = torch.device("cuda", 1)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (50, 100))
    assert memory_budget(EngineConfig(), torch.device("cpu")) == CPU_GIB * 2**30
    assert memory_budget(EngineConfig(kv_memory_gib=1), gpu) == 2**30
    assert memory_budget(EngineConfig(), gpu) == pytest.approx(40)
    assert memory_budget(EngineConfig(gpu_memory_utilization=0.3), gpu) == 0
    assert asked == [gpu, gpu]
