"""The training benchmark runs, compares like with like, and prints finite ratios; it asserts no times."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tah2.bench import train as bench
from tah2.bench.rounds import Ratio, Timing, interleaved
from tah2.bench.steps import CONTINUE_FRACTION, SHAPES, OurStep, TransformersStep, Workload
from tah2.bench.train import FULL, TARGETS, Plan, paper_profile, plan_of
from tah2.cli.frame import main
from tah2.config.backbone import BackboneConfig, preset
from tah2.train.parallel import World

WORK = Workload((20, 12), prompt=0.3)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers(entry)]
    if isinstance(value, list):
        return [number for entry in value for number in numbers(entry)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.slow
def test_the_quick_benchmark_prints_every_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, threads = tmp_path / "bench.json", torch.get_num_threads()
    assert main(["bench", "train", "--quick", "--json", "--threads", str(threads), "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert set(report["ratios"]) == set(report["targets"]) == set(TARGETS)
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert all(math.isfinite(number) for number in numbers(report))
    assert report["machine"]["threads"] == threads
    (works,) = report["times"].values()
    for work in works.values():
        assert 0.3 <= work["continued"] <= 0.5
        assert len(work["steps"]["tah2"]["rounds_s"]) == 2


def test_tah2_costs_less_than_the_papers_label_passes_suggest():
    assert paper_profile() == pytest.approx(1.703, abs=5e-4)


def test_the_full_plan_measures_what_the_targets_name():
    assert {"qwen3-5m", "smollm2-135m"} == set(FULL.workloads)
    assert FULL.growth[0] == 1024
    assert FULL.growth[-1] == 16384
    assert FULL.four_k == 4096


def test_one_model_is_measured_on_as_many_tokens_as_asked(monkeypatch: pytest.MonkeyPatch):
    asked: list[Plan] = []
    monkeypatch.setattr(bench, "measure", lambda plan, threads, say: asked.append(plan) or {})
    monkeypatch.setattr("tah2.cli.bench._show", lambda report: None)
    assert main(["bench", "train", "--model", "qwen3-1.7b", "--rounds", "3"]) == 0
    (plan,) = asked
    assert plan == Plan(3, {"qwen3-1.7b": {"even": Workload((1024,) * 4, 0.3)}}, "qwen3-1.7b", (4096,))
    assert plan.four_k == 4096


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "qwen3-1.8b"], "did you mean 'qwen3-1.7b'?"),
        (["--model", "qwen3-tiny", "--tokens", "4096"], "between 64 and 1024"),
        (["--tokens", "4096"], "'--tokens' belongs to '--model'"),
    ],
)
def test_sizes_that_cannot_be_measured_are_named(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", "train", *words]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-1.7b"])
def test_the_sizes_for_gpus_are_the_published_ones(model: str):
    assert BackboneConfig.from_hf(SHAPES[model]) == preset(model)


@pytest.mark.slow
def test_a_plan_of_one_model_runs():
    report = bench.measure(replace(plan_of("qwen3-tiny", 64), rounds=1), torch.get_num_threads())
    assert set(report["ratios"]) == set(TARGETS)
    assert [row["tokens"] for row in report["growth"]["rows"]] == [64]
    assert all(math.isfinite(number) for number in numbers(report))


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_contenders_share_weights_and_data_and_no_step_changes_them(precision: Literal["auto", "bf16"]):
    """bf16 is how GPUs run it: then our weights are sharded tensors."""
    rel = 1e-5 if precision == "auto" else 0.01
    with World() as world:
        ours = OurStep("qwen3-tiny", "standard", WORK, world, precision=precision)
        theirs = TransformersStep("qwen3-tiny", WORK, world, ours)
        before = ours.loss()
        assert before == pytest.approx(theirs.loss(), rel=rel)
        ours(), theirs()
        assert ours.loss() == before
        assert before == pytest.approx(theirs.loss(), rel=rel)


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_a_chosen_share_of_tokens_continues_and_is_counted(precision: Literal["auto", "bf16"]):
    with World() as world:
        step = OurStep("qwen3-tiny", "tah2", WORK, world, precision=precision)
        assert step.continued == pytest.approx(CONTINUE_FRACTION, abs=0.05)
        counts = step.measured.counts
        assert counts.lookahead_tokens_actual[0] <= counts.tokens[0] - counts.tokens[1]
        assert step.flops.total_actual < step.flops.total_paper


def test_rounds_run_every_contender_in_turns():
    ran: list[str] = []
    contenders = {name: lambda name=name: ran.append(name) for name in ("a", "b")}
    times = interleaved(contenders, 2, torch.device("cpu"))
    assert ran == ["b", "a", "a", "b", "b", "a"]
    assert [len(timing.seconds) for timing in times.values()] == [2, 2]


def test_a_ratio_compares_the_best_rounds_and_shows_all():
    ratio = Ratio.of(Timing((4.0, 3.0), (2.0, 2.0)), Timing((2.0, 1.0), (4.0, 1.0)))
    assert (ratio.value, ratio.rounds, ratio.processor) == (3.0, (2.0, 3.0), 2.0)
    assert ratio.plain(0.5)["of_best"] == 1.5
