"""A preempted request replays what it has decided: nothing about its output changes."""

from __future__ import annotations

import pytest

from tah2.engine.params import SamplingParams
from tests.engine.tiny import KINDS, Ask, drained, engine, expected, run, same

SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=5)
ASK = Ask(tuple(range(2, 11)), SEEDED)
OTHER = Ask((9, 8, 7), SamplingParams(temperature=0.0, max_tokens=9))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
@pytest.mark.parametrize("caching", [False, True])
def test_preemption_at_every_pass_boundary(kind: str, wavefront_rows: int, caching: bool):
    """With one preemption per run, at pass 1, 2, ... until the request finishes before it comes."""
    boundary = 0
    while True:
        made = engine(kind, max_batch_tokens=5, wavefront_rows=wavefront_rows, enable_prefix_caching=caching)
        made.add_request("x", ASK.prompt, ASK.params)
        outputs = {}
        for step in range(500):
            if step == boundary:
                made.preempt("x")
                made.check()
                assert len(made.scheduler.running) == 0
            outputs.update({out.request_id: out for out in made.step() if out.finished})
            if not made.has_unfinished_requests():
                break
        same(kind, ASK, outputs["x"])
        drained(made)
        if step < boundary:
            break
        boundary += 1
    assert boundary > 5


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_after_every_token(kind: str):
    """Two requests preempt each other, over and over: one of them after each of its tokens."""
    made = engine(kind, max_batch_tokens=5)
    for name, ask in (("x", ASK), ("y", OTHER)):
        made.add_request(name, ask.prompt, ask.params)
    outputs, lengths = {}, {"x": 0, "y": 0}
    for _ in range(2000):
        for request in list(made.scheduler.running):
            if len(request.output) > lengths[request.id]:
                lengths[request.id] = len(request.output)
                made.preempt(request.id)
                break
        outputs.update({out.request_id: out for out in made.step() if out.finished})
        made.check()
        if not made.has_unfinished_requests():
            break
    same(kind, ASK, outputs["x"])
    same(kind, OTHER, outputs["y"])
    assert outputs["x"].metrics.num_preemptions + outputs["y"].metrics.num_preemptions > 4
    drained(made)


@pytest.mark.parametrize("kind", ["tah2-4", "huginn", "ouro-adaptive"])
@pytest.mark.parametrize("caching", [False, True])
def test_a_pool_too_small_for_all_serves_all(kind: str, caching: bool):
    """Requests are preempted, oldest last, and none is dropped."""
    asks = {
        f"r{i}": Ask(tuple((7 * i + j) % 48 for j in range(3 + i % 5)), SamplingParams(seed=i, max_tokens=12))
        for i in range(8)
    }
    made = engine(kind, kv_slots=110, max_num_seqs=8, admission_horizon=0, enable_prefix_caching=caching)
    outputs = run(made, asks)
    for name, ask in asks.items():
        same(kind, ask, outputs[name])
    if kind != "ouro-adaptive":
        assert made.stats.preemptions > 0
    drained(made)


def test_recorded_depths_are_replayed_not_decided_again():
    """Even if the gate changes its mind in between, settled tokens keep the depths that they had."""
    kind = "tah2-2"
    made = engine(kind, enable_prefix_caching=False)
    made.add_request("x", ASK.prompt, ASK.params)
    for _ in range(5):
        made.step()
    (request,) = made.scheduler.running
    settled = list(request.depths)
    made.preempt("x")
    request.threshold = 2.0
    made.step()
    made.step()
    assert request.depths[: len(settled)] == settled
    assert max(settled) == 2
    made.abort("x")
    drained(made)


def test_expected_outputs_vary():
    assert len({tuple(expected(kind, ASK).token_ids) for kind in KINDS}) == len(KINDS)
