"""What comes back beside tokens: log-probabilities, depths, continue probabilities, FLOPs, statistics."""

from __future__ import annotations

import pytest
import torch

from tah2.compute.decode import DecodeMeter
from tah2.engine.params import SamplingParams
from tah2.model.loop import LoopSettings, Tokens
from tah2.model.output import log_weights
from tah2.model.scoring import score
from tests.engine.tiny import KINDS, Ask, drained, engine, expected, model, run, same

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
PARAMS = SamplingParams(temperature=0.8, seed=6, max_tokens=7, logprobs=3)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_mixed_distribution(kind: str):
    truth = expected(kind, Ask(PROMPT, PARAMS))
    made = engine(kind)
    made.add_request("other", (1, 2, 3), PARAMS)
    output = run(made, {"x": Ask(PROMPT, PARAMS)})["x"].outputs[0]
    assert output.logprobs is not None
    total = 0.0
    for token, row, mixed in zip(output.token_ids, output.logprobs, truth.mixed, strict=True):
        logprobs = mixed.log_softmax(-1)
        best = logprobs.topk(3).indices.tolist()
        assert set(row) == {token, *best}
        assert [row[name].rank for name in best] == [1, 2, 3]
        assert row[token].rank == int((logprobs > logprobs[token]).sum()) + 1
        for name, entry in row.items():
            assert entry.logprob == pytest.approx(float(logprobs[name]), abs=1e-4)
        total += row[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("kind", ["tah2-4", "tah2-fixed", "top-k-embedding"])
@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_logprobs_of_every_depth_mix_to_the_whole(kind: str, wavefront_rows: int):
    params = SamplingParams(temperature=0.8, seed=6, max_tokens=7, logprobs=1, depth_logprobs=True)
    output = run(engine(kind, wavefront_rows=wavefront_rows), {"x": Ask(PROMPT, params)})["x"].outputs[0]
    assert output.logprobs is not None
    assert output.depth_logprobs is not None
    assert [len(depths) for depths in output.depth_logprobs] == output.depths
    for i, token in enumerate(output.token_ids):
        own = torch.tensor([row[token].logprob for row in output.depth_logprobs[i]])
        if kind == "tah2-fixed":
            weights = torch.full_like(own, 1 / len(own))
        else:
            chances = torch.tensor(output.continue_probs[i][: len(own)])
            survival = torch.cat([torch.ones(1), chances.cumprod(0)])[: len(own)]
            weights = survival.clone()
            weights[:-1] -= survival[1:]
        mixed = float((weights * own.exp()).sum().log())
        assert output.logprobs[i][token].logprob == pytest.approx(mixed, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caching", [False, True])
def test_prompt_logprobs_are_those_of_scoring(kind: str, caching: bool):
    decoder = model(kind)
    position = torch.arange(len(PROMPT))
    tokens = Tokens(torch.tensor(PROMPT), torch.zeros_like(position), position)
    runs_all = torch.ones_like(position, dtype=torch.bool) if decoder.kind.prefill_runs_all else None
    with torch.no_grad():
        logits = score(decoder, tokens, settings=LoopSettings(run_all=runs_all)).logits.log_softmax(-1)
    made = engine(kind, max_batch_tokens=3, enable_prefix_caching=caching)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    for name in ("x", "again"):
        output = run(made, {name: Ask(PROMPT, params)})[name]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(PROMPT)
        for at in range(1, len(PROMPT)):
            row = output.prompt_logprobs[at]
            assert row is not None
            assert row[PROMPT[at]].logprob == pytest.approx(float(logits[at - 1, PROMPT[at]]), abs=1e-4)
            assert set(logits[at - 1].topk(2).indices.tolist()) <= set(row)
    drained(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_flops_are_the_formulas_at_the_recorded_depths(kind: str, wavefront_rows: int):
    decoder, ask = model(kind), Ask(PROMPT, PARAMS)
    truth = expected(kind, ask)
    meter = DecodeMeter(decoder.backbone, decoder.loop, truth.prompt_depths)
    for depth in truth.depths[1:]:
        meter.token(depth)
    made = engine(kind, wavefront_rows=wavefront_rows)
    output = run(made, {"x": ask})["x"].outputs[0]
    assert output.decode_flops == meter.total == made.stats.decode_flops
    assert output.mean_depth == sum(truth.depths) / len(truth.depths)


@pytest.mark.parametrize("kind", ["tah2-4", "ouro-adaptive"])
def test_continue_probabilities_explain_the_depths(kind: str):
    decoder = model(kind)
    made = engine(kind)
    output = run(made, {"x": Ask(PROMPT, PARAMS)})["x"].outputs[0]
    ceiling, threshold = decoder.ceiling(), decoder.loop.exit_threshold
    prompt_runs_all = decoder.kind.prefill_runs_all
    for depth, chances in zip(output.depths, output.continue_probs, strict=True):
        assert len(chances) == min(depth, ceiling - 1)
        survival, reached = 1.0, 1
        for chance in chances:
            survival *= chance
            score_of = chance if kind == "tah2-4" else survival
            if score_of < threshold:
                break
            reached += 1
        assert depth == (ceiling if prompt_runs_all else reached)
        prompt_runs_all = False


def test_mixture_weights_of_the_model_agree_with_recorded_probabilities():
    decoder = model("tah2-4")
    position = torch.arange(len(PROMPT))
    with torch.no_grad():
        run_of = score(decoder, Tokens(torch.tensor(PROMPT), torch.zeros_like(position), position)).run
    weights = log_weights(decoder.kind.output, run_of)
    output = run(engine("tah2-4"), {"x": Ask(PROMPT, PARAMS)})["x"].outputs[0]
    last = [
        float(w[c.index == len(PROMPT) - 1].exp())
        for w, c in zip(weights, run_of.passes, strict=True)
        if (c.index == len(PROMPT) - 1).any()
    ]
    assert len(last) == output.depths[0]
    if len(last) > 1:
        assert last[0] == pytest.approx(1 - output.continue_probs[0][0], abs=1e-5)


def test_thresholds_and_ceilings_of_requests_differ_within_one_batch():
    asks = {
        "shallow": Ask(PROMPT, SamplingParams(temperature=0.0, max_tokens=6, exit_threshold=1.1)),
        "deep": Ask(PROMPT, SamplingParams(temperature=0.0, max_tokens=6, exit_threshold=0.0)),
        "low": Ask(PROMPT, SamplingParams(temperature=0.0, max_tokens=6, max_depth=2, exit_threshold=0.0)),
        "higher": Ask(PROMPT, SamplingParams(temperature=0.0, max_tokens=6, max_depth=6, exit_threshold=0.0)),
        "own": Ask(PROMPT, SamplingParams(temperature=0.0, max_tokens=6)),
    }
    made = engine("tah2-4")
    outputs = run(made, asks)
    for name, ask in asks.items():
        same("tah2-4", ask, outputs[name])
    assert [set(outputs[name].outputs[0].depths) for name in ("shallow", "deep", "low", "higher")] == [
        {1},
        {4},
        {2},
        {6},
    ]
    drained(made)


def test_metrics_tell_a_requests_life_in_order():
    made = engine("tah2-2")
    output = run(made, {"x": Ask(PROMPT, PARAMS)})["x"]
    metrics = output.metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    assert made.stats.output_tokens == 7
    assert sum(made.stats.depths.values()) == 7


def test_cost_per_token_grows_with_visible_keys():
    """The slots that a decode entry reads are the visible keys of the formula, at every depth and position."""
    made = engine("tah2-4", wavefront_rows=0)
    seen: list[int] = []
    inner = made.runner.weights.paged

    def counting(query, keys, values, slots, offsets):  # type: ignore[no-untyped-def]
        seen.extend(offsets.diff().tolist())
        return inner(query, keys, values, slots, offsets)

    made.runner.weights.paged = counting
    made.add_request("x", PROMPT, PARAMS)
    while made.has_unfinished_requests():
        made.step()
    lengths = seen[:: len(model("tah2-4").layers)]
    truth = expected("tah2-4", Ask(PROMPT, PARAMS))
    wanted, executed = [], list(truth.prompt_depths)
    for depth in truth.depths[1:]:
        wanted += [sum(min(m, last) for last in executed) + m for m in range(1, depth + 1)]
        executed.append(depth)
    assert lengths[-len(wanted) :] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_with_and_without_a_cache_agree(kind: str):
    from tah2.engine.reference import generate

    ask = Ask(PROMPT, PARAMS)
    again = generate(model(kind), ask.prompt, ask.params, cached=False)
    assert again.token_ids == expected(kind, ask).token_ids
    assert again.depths == expected(kind, ask).depths
    same(kind, ask, run(engine(kind), {"x": ask})["x"])
