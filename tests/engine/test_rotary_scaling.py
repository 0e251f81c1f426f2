"""Rotary scalings that depend on the text's length: the engine runs them, and shares no prefixes between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tah2.engine.config import EngineConfig
from tah2.engine.engine import Engine
from tah2.engine.params import SamplingParams
from tah2.engine.reference import generate
from tah2.model.loop import LoopedDecoder
from tests.engine.tiny import BACKBONE, LOOPS, Ask, drained, run, spread

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
ASKS = {
    "a": Ask(tuple(range(12)), SamplingParams(temperature=0.0, max_tokens=14)),
    "b": Ask((5, 4), SamplingParams(temperature=0.9, seed=1, max_tokens=20)),
    "c": Ask(tuple(range(20)), SamplingParams(temperature=0.9, seed=2, max_tokens=5)),
}


@pytest.mark.parametrize("kind", ["tah2-4", "ouro", "huginn"])
@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_length_dependent_scalings_give_the_references_tokens(kind: str, rope: dict[str, Any]):
    torch.manual_seed(2)
    decoder = LoopedDecoder(replace(BACKBONE, rope=rope, max_position_embeddings=16), LOOPS[kind]).eval()
    decoder.reset()
    with torch.no_grad():
        spread(decoder)
    made = Engine(decoder, EngineConfig(kv_slots=1000, max_batch_tokens=7, max_model_len=64, kernels="off"))
    outputs = run(made, ASKS, {"b": 1, "c": 4})
    for name, ask in ASKS.items():
        truth = generate(decoder, ask.prompt, ask.params)
        assert outputs[name].outputs[0].token_ids == truth.token_ids
        assert outputs[name].outputs[0].depths == truth.depths
    assert made.prefix is None
    drained(made)
