"""Recorded passes: held inputs and filled-up rows change nothing; on a GPU, the kernels and the graphs themselves."""

from __future__ import annotations

import pytest
import torch

from tah2.engine.config import EngineConfig
from tah2.engine.cuda.attention import paged_attention
from tah2.engine.cuda.graphs import GraphedWeights
from tah2.engine.cuda.replay import Replay, rerun
from tah2.engine.engine import Engine
from tah2.engine.paged import paged_attention as plain_attention
from tah2.engine.params import SamplingParams
from tests.engine.tiny import KINDS, Ask, drained, model, run, same

ASKS = {
    "a": Ask((3, 1, 4, 1, 5, 9, 2, 6), SamplingParams(temperature=0.0, max_tokens=8)),
    "b": Ask((7,), SamplingParams(temperature=0.9, seed=2, max_tokens=8)),
    "c": Ask(tuple(range(20)), SamplingParams(temperature=0.9, seed=3, max_tokens=5)),
}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_the_twin_of_recorded_passes_gives_the_references_tokens(kind: str, wavefront_rows: int):
    weights = GraphedWeights(model(kind), rerun, plain_attention, fused=False)
    config = EngineConfig(kv_slots=4096, seed=0, wavefront_rows=wavefront_rows, max_batch_tokens=7)
    made = Engine(model(kind), config, weights=weights)
    outputs = run(made, ASKS, {"b": 2, "c": 4})
    for name, ask in ASKS.items():
        same(kind, ask, outputs[name])
    drained(made)


def test_passes_are_recorded_once_per_power_of_two():
    recorded = []

    def capture(call):
        recorded.append(call)
        return call

    weights = GraphedWeights(model("standard"), lambda: capture, plain_attention, fused=False)
    made = Engine(model("standard"), EngineConfig(kv_slots=4096, seed=0), weights=weights)
    asks = {str(n): Ask((n, 3), SamplingParams(temperature=0.0, max_tokens=4 + n)) for n in range(5)}
    run(made, asks)
    run(made, asks)
    assert len(recorded) == 4  # of 1, 2, 4 and 8 rows


def test_longer_slot_lists_are_recorded_anew():
    weights = GraphedWeights(model("tah2-2"), rerun, plain_attention, fused=False)
    weights._begin(slots=16)
    made = Engine(model("tah2-2"), EngineConfig(kv_slots=4096, seed=0), weights=weights)
    outputs = run(made, ASKS)
    assert len(weights._slots) >= 32
    for name, ask in ASKS.items():
        same("tah2-2", ask, outputs[name])


def test_an_engine_and_its_recordings_go_together():
    whole = GraphedWeights(model("tah2-2"), rerun, plain_attention, fused=False)
    first = Engine(model("tah2-2"), EngineConfig(kv_slots=4096, seed=0), weights=whole)
    run(first, ASKS)
    other = whole.behind(model("tah2-2"))
    assert not other._replays
    second = Engine(model("tah2-2"), EngineConfig(kv_slots=4096, seed=0), weights=other)
    for name, output in run(second, ASKS).items():
        same("tah2-2", ASKS[name], output)


def test_rows_that_leave_are_filled_up_again():
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        seen.append(flag.clone())
        return x + flag[:, None]

    three, one = torch.randn(3, 2), torch.randn(1, 2)
    replay = Replay(function, 4, (three, torch.ones(3)), (0, -1), rerun())
    torch.testing.assert_close(replay(three, torch.ones(3)), three + 1)
    first = replay(one, torch.ones(1))
    assert seen[-1].tolist() == [1, -1, -1, -1]
    replay(three, torch.zeros(3))
    torch.testing.assert_close(first, one + 1)  # an output is its caller's own


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 8), (16, 8, 128), (9, 3, 64), (32, 2, 96)])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 700], [64, 63, 65, 128, 1, 2], [5000]])
def test_the_kernel_equals_the_plain_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, lengths: list[int]
):
    torch.manual_seed(1)
    pool = torch.randn(2, 3, 6000, kv_heads, width, device="cuda", dtype=dtype)
    query = torch.randn(len(lengths), heads, width, device="cuda", dtype=dtype)
    slots = torch.cat([torch.randperm(6000)[:n] for n in lengths]).cuda()
    offsets = torch.tensor([0, *lengths]).cumsum(0).cuda()
    ours = paged_attention(query, pool[0, 1], pool[1, 1], slots, offsets)
    expected = plain_attention(query.float(), pool[0, 1].float(), pool[1, 1].float(), slots, offsets)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=tolerance)


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_graphs_give_the_references_tokens(kind: str, wavefront_rows: int):
    import copy

    decoder = copy.deepcopy(model(kind)).cuda()
    config = EngineConfig(kv_slots=4096, seed=0, wavefront_rows=wavefront_rows, max_batch_tokens=7)
    made = Engine(decoder, config)
    assert isinstance(made.runner.weights, GraphedWeights)
    outputs = run(made, ASKS, {"b": 2, "c": 4})
    for name, ask in ASKS.items():
        same(kind, ask, outputs[name])
    drained(made)
