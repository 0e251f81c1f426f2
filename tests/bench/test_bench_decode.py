"""The decoding benchmark runs, controls depths, takes turns fairly, and never passes a peer that is not there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tah2.bench.decode import FULL, MEAN_DEPTH, QUICK, TARGETS, greedy
from tah2.bench.decoders import (
    Engines,
    Models,
    Stretch,
    TransformersPeer,
    decode,
    make_models,
    side_by_side,
    threshold_of_depth,
)
from tah2.cli.frame import main


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with torch.inference_mode():
        yield make_models("qwen3-tiny", (2, 4))


@pytest.mark.slow
def test_the_quick_benchmark_prints_every_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, threads = tmp_path / "bench.json", torch.get_num_threads()
    assert main(["bench", "decode", "--quick", "--json", "--threads", str(threads), "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert set(report["ratios"]) == set(report["targets"]) == set(TARGETS)
    missing = {name for name, ratio in report["ratios"].items() if ratio is None}
    assert missing == set(report["missing"])
    assert all(ratio > 0 and math.isfinite(ratio) for ratio in report["ratios"].values() if ratio is not None)
    assert report["raw"]["weights"] == "random"
    assert report["machine"]["threads"] == threads


def test_the_full_plan_measures_what_the_targets_name():
    assert set(FULL.each) == set(QUICK.each) == {1, 4, 8, 16}
    assert FULL.prefill == 512


def test_the_peer_runs_the_same_weights(models: Models):
    with torch.inference_mode():
        prompts, peer = models.prompts(2, 8), TransformersPeer(models)
        assert peer.decode(prompts, 5)[1] == greedy(Engines(models, 64), prompts, 6)


def test_llamacpp_runs_the_same_weights(models: Models, tmp_path: Path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra 'peers')")
    from tah2.bench.llamacpp import LlamaCppPeer

    with torch.inference_mode():
        prompts = models.prompts(3, 8)
        peer = LlamaCppPeer(models.standard, tmp_path, sequences=3, context=32, threads=1)
        assert peer.decode(prompts, 5)[1] == greedy(Engines(models, 64), prompts, 6)
        peer.close()


def test_depths_are_controlled(models: Models):
    with torch.inference_mode():
        engine, prompts = Engines(models, 512).tah2(2), models.prompts(8, 8)
        threshold = threshold_of_depth(engine, prompts, 12, MEAN_DEPTH)
        run = decode(engine, prompts, 12, threshold)
    assert run.mean_depth == pytest.approx(MEAN_DEPTH, abs=0.1)
    assert run.tokens >= 8 * 12
    assert not engine.has_unfinished_requests()


def test_waiting_for_the_deepest_takes_more_passes_for_the_same_tokens(models: Models):
    with torch.inference_mode():
        engines, prompts = Engines(models, 512), models.prompts(4, 8)
        steps = []
        for engine in (engines.tah2(4, wavefront=False), engines.tah2(4, lockstep=True)):
            decode(engine, prompts, 2, 0.5)
            threshold = threshold_of_depth(engine, prompts, 12, MEAN_DEPTH)
            before = engine.stats.steps
            run = decode(engine, prompts, 12, threshold)
            steps.append((engine.stats.steps - before) / run.tokens)
    assert steps[0] < steps[1]


def test_stretches_take_turns_by_the_time_they_have_had(models: Models):
    with torch.inference_mode():
        engines, prompts = Engines(models, 64), models.prompts(1, 8)
        one, other = side_by_side(*(Stretch(engines.standard(), prompts, 4) for _ in range(2)))
    assert one.tokens == other.tokens == 4
    assert one.flops == other.flops > 0
