"""Two processes that hold one model between them give the tokens of one process, whatever the engine does."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.llm import LLM
from tah2.engine.outputs import RequestOutput
from tah2.engine.parallel import ShardedWeights, SummedLinear, refuse_uneven, shard
from tah2.engine.params import SamplingParams
from tah2.engine.team import ALONE, Team
from tah2.model.loop import LoopedDecoder
from tests.engine.ranks import PREEMPTED, llama, on_one_of_two
from tests.engine.test_equals_reference import ASKS
from tests.engine.tiny import BACKBONE, KINDS, LOOPS, same


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(on_one_of_two, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_references_tokens(ranks: list[dict[str, Any]], kind: str):
    for found in ranks:
        for name, ask in ASKS.items():
            same(kind, ask, found[kind][name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", PREEMPTED)
def test_preemption_changes_nothing_either(ranks: list[dict[str, Any]], kind: str):
    assert ranks[0][f"{kind} preempted"][1] == ranks[1][f"{kind} preempted"][1] > 0
    for outputs, _ in (found[f"{kind} preempted"] for found in ranks):
        for name, ask in ASKS.items():
            same(kind, ask, outputs[name])


@pytest.mark.slow
def test_ranks_never_disagree(ranks: list[dict[str, Any]]):
    assert tokens(ranks[0]["unseeded"]) == tokens(ranks[1]["unseeded"])
    for found in ranks:
        for name, ask in ASKS.items():
            same("tah2-4", ask, found["estranged"][name])


@pytest.mark.slow
def test_ranks_follow_a_leader(ranks: list[dict[str, Any]]):
    assert set(ranks[0]["conducted"]) == set(ASKS)
    for name, ask in ASKS.items():
        same("tah2-2", ask, ranks[0]["conducted"][name])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_llm_takes_rank_0s_prompts(ranks: list[dict[str, Any]], tied: bool):
    alone = LLM(llama(tied), kv_slots=500, kernels="off", device="cpu")
    truth = alone.generate([[1, 2, 3], [4]], SamplingParams(temperature=0.8, seed=4, max_tokens=9))
    streamed = alone.generate([5], SamplingParams(temperature=0.0, max_tokens=4))[0]
    for found in ranks:
        assert [o.outputs[0].token_ids for o in found[f"llm {tied}"]] == [o.outputs[0].token_ids for o in truth]
        assert found[f"stream {tied}"].outputs[0].token_ids == streamed.outputs[0].token_ids


@pytest.mark.slow
def test_each_rank_keeps_its_heads_in_equally_many_slots(ranks: list[dict[str, Any]]):
    layers, slots, kv_heads, head_dim = ranks[0]["slots"]
    assert (layers, kv_heads, head_dim) == (2, 1, 8)
    assert ranks[1]["slots"] == ranks[0]["slots"]
    assert slots == int(1e-4 * 2**30) // (2 * layers * head_dim * 4)


@pytest.mark.slow
def test_what_fails_on_rank_0_fails_everywhere(ranks: list[dict[str, Any]]):
    for found in ranks:
        first, second, third = found["errors"]
        assert first == "KeyError: 'here'"
        assert second == "full"
        assert "needs 3 processes, not 2" in third


def test_what_does_not_divide_is_refused():
    for change in ({"num_kv_heads": 2, "num_heads": 6}, {"num_kv_heads": 3, "num_heads": 3, "intermediate_size": 25}):
        with pytest.raises(ConfigError, match="use a divisor"):
            refuse_uneven(replace(BACKBONE, **change), 3)
    refuse_uneven(BACKBONE, 2)


def test_one_process_is_no_team(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        LLM(None, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="weight_storage"):
        EngineConfig(tensor_parallel_size=2, weight_storage="int8")
    assert Team.join(1) is not None
    assert ALONE.alone


def test_gpus_go_to_local_processes_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = Team(rank=5, size=8)
    assert second.place("cuda") == torch.device("cuda", 1)
    assert second.place("cuda:3") == torch.device("cuda", 3)
    assert second.place("cpu") == torch.device("cpu")
    assert ALONE.place("cuda") == torch.device("cuda")
    monkeypatch.delenv("LOCAL_RANK")
    assert second.place("cuda") == torch.device("cuda", 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert second.place() == torch.device("cuda", 5)


@pytest.mark.parametrize("tied", [True, False])
def test_shares_of_a_model_add_up_to_it(tied: bool):
    """Without processes: what each rank of three would hold, put together by hand."""
    backbone = replace(BACKBONE, num_heads=6, num_kv_heads=3, vocab_size=47, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole = LoopedDecoder(backbone, LOOPS["tah2-2"])
    whole.reset()
    parts = [shard(copy.deepcopy(whole), Team(rank, 3)) for rank in range(3)]
    x = torch.randn(5, backbone.query_width)
    projections = [part.layers[0].self_attn.o_proj for part in parts]
    assert all(isinstance(projection, SummedLinear) for projection in projections)
    summed = sum(p(columns) for p, columns in zip(projections, x.chunk(3, dim=1), strict=True))
    torch.testing.assert_close(summed, whole.layers[0].self_attn.o_proj(x))
    heads = torch.cat([ShardedWeights(part, Team(rank, 3)).head_part for rank, part in enumerate(parts)])
    assert torch.equal(heads, whole.head_weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = torch.cat([getattr(part.layers[1].self_attn, name).weight for part in parts])
        assert torch.equal(rows, getattr(whole.layers[1].self_attn, name).weight)
