"""The prefix cache changes what is computed, never what comes out."""

from __future__ import annotations

import numpy as np
import pytest

from tah2.engine.params import SamplingParams
from tests.engine.tiny import KINDS, Ask, drained, engine, run, same

LONG = tuple((5 * i * i + 3 * i + 1) % 48 for i in range(24))
SEEDED = SamplingParams(temperature=0.8, seed=2, max_tokens=5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fully_cached_prompt_equals_a_cold_run(kind: str):
    made, ask = engine(kind), Ask(LONG, SEEDED)
    first, second = run(made, {"x": ask})["x"], run(made, {"y": ask})["y"]
    same(kind, ask, first)
    same(kind, ask, second)
    assert first.metrics.num_cached_tokens == 0
    assert second.metrics.num_cached_tokens == len(LONG) - 1
    drained(made)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_split_a_node(kind: str):
    """Prompts leave the cached path in the middle of nodes, at several places, in a batch."""
    made = engine(kind, max_batch_tokens=9)
    asks = {f"p{cut}": Ask((*LONG[:cut], 40, cut, 41), SEEDED) for cut in (1, 5, 6, 13, 23)}
    run(made, {"x": Ask(LONG, SEEDED)})
    outputs = run(made, asks)
    for name, ask in asks.items():
        same(kind, ask, outputs[name])
        assert outputs[name].metrics.num_cached_tokens == int(name[1:])
    drained(made)


@pytest.mark.parametrize("kind", KINDS)
def test_identical_prompts_in_one_batch_share_their_prefill(kind: str):
    made = engine(kind, max_batch_tokens=10)
    asks = {"x": Ask(LONG, SEEDED), "y": Ask(LONG, SamplingParams(temperature=0.0, max_tokens=5))}
    outputs = run(made, asks)
    for name, ask in asks.items():
        same(kind, ask, outputs[name])
    assert outputs["y"].metrics.num_cached_tokens == len(LONG) - 1
    drained(made)


def test_a_running_request_is_hit():
    made = engine("tah2-4")
    ask = Ask(LONG, SamplingParams(temperature=0.0, max_tokens=30))
    made.add_request("x", ask.prompt, ask.params)
    while not made.scheduler.running or not made.scheduler.running[0].output:
        made.step()
    follower = Ask((*LONG, 1, 2), SEEDED)
    made.add_request("y", follower.prompt, follower.params)
    outputs = {}
    while made.has_unfinished_requests():
        outputs.update({out.request_id: out for out in made.step() if out.finished})
        made.check()
    assert outputs["y"].metrics.num_cached_tokens == len(LONG)
    same("tah2-4", ask, outputs["x"])
    same("tah2-4", follower, outputs["y"])
    drained(made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_reuses_the_first_answer_where_answers_run_as_prompts_do(kind: str):
    made = engine(kind)
    first = run(made, {"x": Ask(LONG, SEEDED)})["x"].outputs[0].token_ids
    turn = Ask((*LONG, *first, 7, 7), SEEDED)
    output = run(made, {"y": turn})["y"]
    same(kind, turn, output)
    answered = 0 if kind == "ouro-adaptive" else len(first) - 1
    assert output.metrics.num_cached_tokens == len(LONG) + answered
    drained(made)


def test_depth_settings_have_trees_of_their_own():
    made = engine("tah2-4")
    for name, params in {
        "a": SamplingParams(temperature=0.0, max_tokens=3),
        "b": SamplingParams(temperature=0.0, max_tokens=3, exit_threshold=0.9),
        "c": SamplingParams(temperature=0.0, max_tokens=3, max_depth=2),
    }.items():
        output = run(made, {name: Ask(LONG, params)})[name]
        assert output.metrics.num_cached_tokens == 0
        same("tah2-4", Ask(LONG, params), output)
    made.weights_version += 1
    assert run(made, {"d": Ask(LONG, SEEDED)})["d"].metrics.num_cached_tokens == 0
    drained(made)


def test_samples_of_one_request_share_its_prefill():
    made = engine("tah2-2")
    params = SamplingParams(n=3, seed=4, max_tokens=6)
    output = run(made, {"x": Ask(LONG, params)})["x"]
    assert [sample.metrics.num_cached_tokens for sample in output.outputs] == [0, len(LONG) - 1, len(LONG) - 1]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    alone = SamplingParams(seed=4, max_tokens=6)
    same("tah2-2", Ask(LONG, alone), run(made, {"y": Ask(LONG, alone)})["y"])
    assert run(made, {"y": Ask(LONG, alone)})["y"].outputs[0].token_ids == output.outputs[0].token_ids
    drained(made)


def test_least_recently_used_leaves_are_evicted_first_and_locked_ones_never():
    made = engine("standard", kv_slots=70, max_model_len=60)
    prompts = {name: tuple(start + i for i in range(16)) for name, start in (("a", 0), ("b", 16), ("c", 32))}
    params = SamplingParams(temperature=0.0, max_tokens=2)
    for name in ("a", "b", "c", "a"):
        run(made, {name: Ask(prompts[name], params)})
    assert made.prefix is not None
    long = Ask(tuple((11 * i) % 48 for i in range(30)), params)
    same("standard", long, run(made, {"x": long})["x"])
    key = (0, 1, None)
    kept = {name: made.prefix.matched(key, np.array(prompt)) for name, prompt in prompts.items()}
    assert kept == {"a": 16, "b": 0, "c": 16}
    drained(made)


def test_an_unlocked_tree_counts_all_its_slots_as_idle():
    made = engine("tah2-4")
    made.add_request("x", LONG, SEEDED)
    for _ in range(6):
        made.step()
    assert made.prefix is not None
    assert made.prefix.idle_looped == 0
    assert sum(len(slots) for slots in made.prefix.owned()[0]) >= len(LONG)
    made.abort("x")
    drained(made)
