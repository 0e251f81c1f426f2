"""What each of two processes does in the tests of tensor parallelism; both import this module by its name."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tah2.config.strict import ConfigError
from tah2.engine import engine as engine_module
from tah2.engine import team as team_module
from tah2.engine.chorus import Leader, follow
from tah2.engine.config import EngineConfig
from tah2.engine.engine import Engine
from tah2.engine.llm import LLM
from tah2.engine.outputs import RequestOutput
from tah2.engine.parallel import shard
from tah2.engine.params import SamplingParams
from tah2.engine.team import Team
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tah2.model.loop import LoopedDecoder
from tests.engine.test_equals_reference import ASKS
from tests.engine.tiny import KINDS, Ask, drained, model, run, spread

PREEMPTED = ("tah2-4", "ouro-adaptive", "huginn")
ARRIVALS = {"b": 2, "c": 3, "d": 9, "e": 11}
HOT = {str(i): Ask((i, 2), SamplingParams(temperature=2.0, max_tokens=12)) for i in range(3)}


def engine_of(decoder: LoopedDecoder, team: Team, **config: Any) -> Engine:
    settings = {"kv_slots": 4096, "max_batch_tokens": 7, "wavefront_rows": 99, "tensor_parallel_size": 2, **config}
    return Engine(shard(copy.deepcopy(decoder), team), EngineConfig(**settings), team=team)


def llama(tied: bool) -> LoopedForCausalLM:
    """An odd vocabulary, biases everywhere, one head and key-value head per rank."""
    torch.manual_seed(3)
    backbone = {
        "model_type": "llama",
        "vocab_size": 47,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 200,
    }
    made = LoopedForCausalLM(LoopedConfig(backbone=backbone, loop={"kind": "tah2", "max_depth": 3})).eval()
    with torch.no_grad():
        spread(made.model)
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return made


def on_one_of_two(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    team_module.PATIENCE = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder / 'meet'}", timedelta(seconds=60), 2, rank)
    team = Team.join(2)
    found: dict[str, Any] = {}
    for kind in KINDS:
        made = engine_of(model(kind), team)
        found[kind] = run(made, ASKS, ARRIVALS)
        drained(made)
        if kind not in PREEMPTED:
            continue
        again = engine_of(model(kind), team, kv_slots=140, enable_prefix_caching=False, admission_horizon=0)
        found[f"{kind} preempted"] = run(again, ASKS), again.stats.preemptions
        drained(again)
    found["unseeded"] = run(engine_of(model("tah2-4"), team, seed=None), HOT)
    found["estranged"] = estranged(rank, team)
    found["conducted"] = conducted(rank, team)
    for tied in (True, False):
        llm = LLM(llama(tied), tensor_parallel_size=2, kv_slots=500 + rank, device="cpu")
        prompts = [[1, 2, 3], [4]] if rank == 0 else [[9]]
        found[f"llm {tied}"] = llm.generate(prompts, SamplingParams(temperature=0.8, seed=4, max_tokens=9))
        found[f"stream {tied}"] = list(llm.stream([5], SamplingParams(temperature=0.0, max_tokens=4)))[-1]
    found["slots"] = Engine(shard(llama(True).model, team), EngineConfig(kv_memory_gib=1e-4 * (1 + rank)), team=team)
    found["slots"] = found["slots"].pools.looped.keys.shape
    found["errors"] = errors(rank, team)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def estranged(rank: int, team: Team) -> dict[str, RequestOutput]:
    """Rank 1's gate and sampler say nonsense."""
    made = engine_of(model("tah2-4"), team)
    sample = engine_module.sample_rows
    if rank == 1:
        assert made.decoder.gate is not None
        for parameter in made.decoder.gate.parameters():
            parameter.data.normal_()
        engine_module.sample_rows = lambda rows, draws, mixture: [0] * len(draws)
    try:
        return run(made, ASKS, ARRIVALS)
    finally:
        engine_module.sample_rows = sample


def conducted(rank: int, team: Team) -> dict[str, RequestOutput]:
    """Rank 0 alone is spoken to."""
    made = engine_of(model("tah2-2"), team)
    if rank == 1:
        follow(made)
        drained(made)
        return {}
    leader = Leader(made)
    with pytest.raises(ConfigError, match="empty"):
        leader.add_request("none", [])
    leader.add_request("left", [1, 2, 3], ASKS["a"].params)
    for name, ask in ASKS.items():
        leader.add_request(name, ask.prompt, ask.params)
    found: dict[str, RequestOutput] = {}
    steps = 0
    while leader.has_unfinished_requests():
        found.update({output.request_id: output for output in leader.step(stream=False)})
        steps += 1
        if steps == 2:
            leader.preempt("a")
            assert leader.abort("left") is not None
    leader.close()
    return found


def errors(rank: int, team: Team) -> list[str]:
    """What fails on rank 0 fails everywhere; a pass that fails ends a team's engine."""

    def fails() -> int:
        if rank == 1:
            raise AssertionError("only rank 0 computes")
        raise KeyError("here")

    seen = []
    try:
        team.first(fails)
    except RuntimeError as error:
        seen.append(str(error))
    made = engine_of(model("standard"), team)

    def broken(*_: object) -> None:
        raise MemoryError("full")

    made.runner.run = broken  # type: ignore[method-assign, assignment]
    made.add_request("x", [1])
    try:
        made.step()
    except MemoryError as error:
        seen.append(str(error))
    try:
        Team.join(3)
    except ConfigError as error:
        seen.append(str(error))
    return seen
