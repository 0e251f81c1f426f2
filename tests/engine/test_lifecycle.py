"""Requests leave at any moment, and what goes wrong with one stays with that one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tah2.config.strict import ConfigError
from tah2.engine.params import SamplingParams
from tah2.engine.pool import PoolError
from tah2.engine.strand import Strand
from tests.engine.tiny import KINDS, Ask, drained, engine, expected, run, same

PROMPT = tuple(range(3, 14))
SEEDED = SamplingParams(temperature=0.9, seed=8, max_tokens=6)
OTHER = Ask((1, 2, 3), SamplingParams(temperature=0.0, max_tokens=12))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_abort_at_every_pass_frees_every_slot(kind: str, wavefront_rows: int):
    for boundary in range(40):
        made = engine(kind, max_batch_tokens=5, wavefront_rows=wavefront_rows)
        made.add_request("x", PROMPT, SEEDED)
        for _ in range(boundary):
            made.step()
        output = made.abort("x")
        drained(made)
        if output is None:
            break
        assert output.outputs[0].finish_reason == "abort"
        assert (
            output.outputs[0].token_ids
            == expected(kind, Ask(PROMPT, SEEDED)).token_ids[: len(output.outputs[0].token_ids)]
        )
    assert output is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_end_of_sequence_ends_and_frees(kind: str, wavefront_rows: int):
    """Each token that the model writes in turn is declared to be the end."""
    written = expected(kind, OTHER).token_ids
    for eos in sorted(set(written)):
        made = engine(kind, eos=(eos,), wavefront_rows=wavefront_rows)
        output = run(made, {"x": OTHER})["x"]
        same(kind, OTHER, output, eos=(eos,))
        assert output.outputs[0].token_ids == written[: written.index(eos) + 1]
        drained(made)


def test_ends_can_be_ignored_postponed_and_added():
    kind, written = "tah2-2", expected("tah2-2", OTHER).token_ids
    ignoring = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    made = engine(kind, eos=(written[0],))
    assert run(made, {"x": Ask(OTHER.prompt, ignoring)})["x"].outputs[0].token_ids == written
    asked = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[written[2]])
    output = run(made, {"y": Ask(OTHER.prompt, asked)})["y"].outputs[0]
    assert (output.token_ids, output.finish_reason) == ([written[0]], "stop")
    made = engine(kind)
    output = run(made, {"y": Ask(OTHER.prompt, asked)})["y"].outputs[0]
    assert (output.token_ids[-1], output.stop_reason) == (written[2], written[2])
    late = Ask(OTHER.prompt, SamplingParams(temperature=0.0, max_tokens=12, min_tokens=4))
    made = engine(kind, eos=(written[0],))
    output = run(made, {"z": late})["z"]
    same(kind, late, output, eos=(written[0],))
    assert len(output.outputs[0].token_ids) >= 5 or output.outputs[0].token_ids[-1] == written[0]
    assert written[0] not in output.outputs[0].token_ids[:4]


class Breaks:
    """Fails every pass that one request takes part in."""

    def __init__(self, made: Any, name: str, after: int) -> None:
        self.run_pass, self.name, self.left = made.runner.run, name, after
        made.runner.run = self

    def __call__(self, strands: list[Strand], drafting: bool = False) -> None:
        if any(strand.request.id == self.name for strand in strands):
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("too large")
        self.run_pass(strands, drafting)


@pytest.mark.parametrize("after", [0, 1, 4, 7])
@pytest.mark.parametrize("kind", ["tah2-4", "huginn"])
def test_a_failing_pass_fails_one_request_only(kind: str, after: int):
    made = engine(kind, max_batch_tokens=8)
    Breaks(made, "bad", after)
    asks = {
        "bad": Ask(PROMPT, SamplingParams(temperature=0.0, max_tokens=20)),
        "good": OTHER,
        "late": Ask(PROMPT, SEEDED),
    }
    outputs = run(made, asks, {"late": 6})
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "OutOfMemoryError: too large" in (outputs["bad"].outputs[0].error or "")
    same(kind, OTHER, outputs["good"])
    same(kind, asks["late"], outputs["late"])
    assert made.stats.failed_requests == 1
    drained(made)


class Poison:
    """A constraint that breaks when it is asked."""

    finished = False

    def allowed(self) -> torch.Tensor:
        raise RuntimeError("no such state")

    def after(self, token: int) -> Poison:
        return self


def test_a_failing_constraint_fails_one_request_only():
    made = engine("tah2-2")
    made.add_request("bad", PROMPT, SEEDED)
    made.scheduler.waiting[0].mask = Poison()
    outputs = run(made, {"good": OTHER})
    assert outputs["bad"].outputs[0].error == "RuntimeError: no such state"
    same("tah2-2", OTHER, outputs["good"])
    drained(made)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ((), {}, "empty"),
        ((48,), {}, "between 0 and 47"),
        (tuple([1] * 300), {}, "shorten the prompt"),
        ((1, 2), {"max_tokens": 60}, "ask for at most 24 tokens"),
        (tuple([1] * 60), {"max_tokens": 1}, "never fit a pool of 100 slots"),
        ((1,), {"logit_bias": {99: 1.0}}, "Token ids must lie"),
        ((1,), {"stop": "x"}, "need a tokenizer"),
        ((1,), {"logprobs": 100}, "at most the vocabulary"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: tuple[int, ...], params: dict[str, Any], words: str):
    made = engine("tah2-4", kv_slots=100)
    with pytest.raises(ConfigError, match=words):
        made.add_request("x", prompt, SamplingParams(**params))
    assert not made.has_unfinished_requests()
    made.add_request("x", (1, 2), SamplingParams(max_tokens=None))
    assert made.scheduler.waiting[0].max_tokens == 24


def test_a_request_that_just_fits_runs_to_its_end():
    made = engine("ouro", kv_slots=60)
    ask = Ask(tuple(range(10)), SamplingParams(seed=1, max_tokens=11))
    same("ouro", ask, run(made, {"x": ask})["x"])
    assert made.stats.preemptions == 0


def test_an_id_may_be_used_again_only_once_it_is_free():
    made = engine("standard")
    made.add_request("x", (1,), OTHER.params)
    with pytest.raises(ConfigError, match="running already"):
        made.add_request("x", (1,), OTHER.params)
    run(made, {})
    made.add_request("x", (1,), OTHER.params)
    made.abort("x")


def test_running_requests_keep_their_pace_while_a_long_prompt_is_read():
    made = engine("standard", max_batch_tokens=8)
    made.add_request("x", OTHER.prompt, SamplingParams(temperature=0.0, max_tokens=40))
    made.step()
    made.add_request("long", [5] * 100, OTHER.params)
    (short,) = made.scheduler.running
    for step in range(10):
        before = len(short.output)
        made.step()
        assert len(short.output) == before + 1, step
        assert not made.scheduler.running[1].output


def test_an_idle_engine_checks_its_slots():
    made = engine("standard")
    assert made.step() == []
    made.pools.looped.slots.take(1)
    made._checked = 0.0
    with pytest.raises(PoolError, match="leaked"):
        made.step()


def test_first_come_first_served():
    made = engine("tah2-2", max_num_seqs=1)
    asks = {f"r{i}": Ask((i, i + 1), SamplingParams(temperature=0.0, max_tokens=3)) for i in range(4)}
    assert list(run(made, asks)) == ["r0", "r1", "r2", "r3"]
