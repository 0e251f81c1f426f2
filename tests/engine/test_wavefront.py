"""Drafts overlap with deep passes: fewer passes, the same tokens, and the rule alone says where it is allowed."""

from __future__ import annotations

import pytest

from tah2.engine.params import SamplingParams
from tah2.engine.slots import Sight
from tah2.visibility import RULES, Rule
from tests.engine.tiny import Ask, drained, engine, run, same

WHOLE_STACK = ("tah2-2", "tah2-4", "tah2-fixed", "ouro", "ouro-adaptive", "top-k-embedding", "last-output")


@pytest.mark.parametrize("kind", WHOLE_STACK)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_drafts_save_passes_and_change_nothing(kind: str, temperature: float):
    ask = Ask((3, 1, 4), SamplingParams(temperature=temperature, seed=4, max_tokens=40))
    plain, wave = engine(kind, wavefront_rows=0), engine(kind, wavefront_rows=4)
    same(kind, ask, run(plain, {"x": ask})["x"])
    output = run(wave, {"x": ask})["x"]
    same(kind, ask, output)
    assert plain.stats.drafted == 0
    assert 0 < wave.stats.agreed <= wave.stats.drafted
    assert wave.stats.steps < plain.stats.steps
    assert wave.stats.entries - plain.stats.entries == wave.stats.wasted_entries
    assert output.outputs[0].decode_flops == run(plain, {"y": ask})["y"].outputs[0].decode_flops
    drained(wave)


def test_at_batch_one_a_deep_entry_and_the_next_tokens_first_share_a_pass():
    """M = 2: a token that goes deep and whose draft is right costs one pass beside its first."""
    made = engine("tah2-2", wavefront_rows=2)
    ask = Ask((3, 1, 4), SamplingParams(temperature=0.0, max_tokens=40, exit_threshold=0.0))
    made.add_request("x", ask.prompt, ask.params)
    shared = 0
    while made.has_unfinished_requests():
        chosen = {strand.depth for request in made.scheduler.running for strand in request.strands}
        shared += chosen == {1, 2}
        made.step()
    assert shared == made.stats.drafted > 0
    assert made.stats.steps == 2 * 40 - made.stats.agreed


@pytest.mark.parametrize("kind", ["standard", "huginn"])
def test_loops_without_shallow_predictions_do_not_draft(kind: str):
    made = engine(kind, wavefront_rows=99)
    ask = Ask((3, 1, 4), SamplingParams(temperature=0.0, max_tokens=10))
    same(kind, ask, run(made, {"x": ask})["x"])
    assert made.stats.drafted == 0


def test_drafts_are_for_batches_that_leave_room():
    made = engine("tah2-2", wavefront_rows=4)
    asks = {f"r{i}": Ask((i + 1,), SamplingParams(temperature=0.0, max_tokens=10)) for i in range(4)}
    outputs = run(made, asks)
    for name, ask in asks.items():
        same("tah2-2", ask, outputs[name])
    assert made.stats.drafted == 0


def test_the_rules_say_whether_a_token_may_start_early():
    assert {name for name, rule in RULES.items() if Sight.of(rule, 4).never_waits} == set(RULES)
    deepest = Rule("deepest", "s <= t and j = m_s", lambda j, m, last: j == last, lambda j, m: j == m)
    everything = Rule("all", "s <= t", lambda j, m, last: j >= 1, lambda j, m: j <= m)
    assert not Sight.of(deepest, 3).never_waits
    assert not Sight.of(everything, 3).never_waits
    assert Sight.of(everything, 1).never_waits
