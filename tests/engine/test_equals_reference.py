"""Whatever the engine does on the way, its tokens and depths are those of the plain reference."""

from __future__ import annotations

import pytest

from tah2.engine.params import SamplingParams
from tests.engine.tiny import KINDS, Ask, drained, engine, expected, run, same

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=20, seed=7, max_tokens=10)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
ASKS = {
    "a": Ask(PROMPT, GREEDY),
    "b": Ask((7,), SEEDED),
    "c": Ask(tuple(range(1, 30)), SamplingParams(temperature=1.0, seed=3, max_tokens=6, presence_penalty=0.5)),
    "d": Ask((2, 2, 2, 2), SamplingParams(temperature=0.7, min_p=0.05, seed=11, max_tokens=14, repetition_penalty=1.2)),
    "e": Ask((*PROMPT, 5, 3), SamplingParams(temperature=0.0, max_tokens=12, frequency_penalty=0.3)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_batch_of_one(kind: str, params: SamplingParams):
    made = engine(kind)
    ask = Ask(PROMPT, params)
    same(kind, ask, run(made, {"x": ask})["x"])
    drained(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
@pytest.mark.parametrize("caching", [False, True])
def test_staggered_batch_with_chunked_prompts(kind: str, wavefront_rows: int, caching: bool):
    made = engine(kind, max_batch_tokens=7, wavefront_rows=wavefront_rows, enable_prefix_caching=caching)
    outputs = run(made, ASKS, {"b": 2, "c": 3, "d": 9, "e": 11})
    for name, ask in ASKS.items():
        same(kind, ask, outputs[name])
    drained(made)


@pytest.mark.parametrize("kind", ["huginn-0-0", "huginn-1-0", "huginn-0-1"])
@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_a_middle_that_loops_without_prelude_or_coda(kind: str, kernels: str):
    made = engine(kind, max_batch_tokens=7, kernels=kernels)
    outputs = run(made, ASKS, {"b": 2, "c": 3, "d": 9, "e": 11})
    for name, ask in ASKS.items():
        same(kind, ask, outputs[name])
    drained(made)


def test_the_models_of_these_tests_use_all_their_depths():
    for kind in ("tah2-4", "ouro-adaptive", "last-output", "uniform-gated"):
        depths = [depth for ask in ASKS.values() for depth in expected(kind, ask).depths]
        assert len(set(depths)) > 1, (kind, depths)
