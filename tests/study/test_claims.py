"""Claims are judged by the data: they turn when the data turn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tah2.evals.statistics import Interval
from tah2.study import claims_tokens
from tah2.study.claims import fixed_loops_plateau, other_ceilings, shallow_on_average
from tah2.study.layout import load_results
from tah2.study.numbers import best_within, mean_depth
from tah2.study.summary import summarise
from tests.study.synthetic import VARIANTS, Made, synthetic_study


def claims(root: Path, variants: tuple[Made, ...]) -> dict[str, dict[str, Any]]:
    summary = summarise(load_results(synthetic_study(root, variants)))
    return {row["claim"]: row for row in summary["claims"]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def as_published(published: Path) -> dict[str, dict[str, Any]]:
    """The synthetic study, TaH2 clearly ahead."""
    ahead = {"standard": 0.05, "tah2-m2": 0.8, "tah2-m8": 1.3}
    variants = tuple(replace(made, skill=ahead.get(made.name, made.skill)) for made in VARIANTS)
    return claims(published, variants)


@pytest.fixture(scope="module")
def turned_round(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same study, TaH2 as bad as Standard was and Standard as good as TaH2 was, M=8 worst of all."""
    skill = {"standard": 0.58, "tah2-m2": 0.34, "tah2-m8": 0.1, "tah2-m4": 0.2, "standard-long": 0.9, "sampled": 0.8}
    loss = {"standard": 0.3, "tah2-m2": 0.41, "tah2-m4": 0.42, "tah2-m8": 0.43}
    depth = {"tah2-m2": 1.6}
    turned = tuple(
        replace(
            made,
            skill=skill.get(made.name, made.skill),
            loss=loss.get(made.name, made.loss),
            depth=depth.get(made.name, made.depth),
        )
        for made in VARIANTS
    )
    return claims(tmp_path_factory.mktemp("turned"), turned)


CERTAIN = (
    "TaH2 M=2 is more accurate than the baseline's best at the same mean decoding FLOPs",
    "TaH2 M=2 is so with one output cutoff for all responses, too",
    "TaH2 M=2 has a lower validation loss than Standard",
    "TaH2's validation loss falls from M = 2 to M = 4",
    "TaH2's validation loss falls from M = 4 to M = 8",
    "TaH2's gain in accuracy grows from M = 2 to M = 8",
    "Every model of TaH2 M=2 runs fewer than 1.35 iterations per token",
    "Budget alone does not catch up: Standard, 3x longer (1.0x the steps) stays below",
)


@pytest.mark.parametrize("claim", CERTAIN)
def test_a_claim_holds_where_the_data_show_it_and_nowhere_else(
    as_published: dict[str, dict[str, Any]], turned_round: dict[str, dict[str, Any]], claim: str
):
    assert as_published[claim]["holds"]
    assert not turned_round[claim]["holds"]


def test_an_ablation_that_helps_does_not_hold(turned_round: dict[str, dict[str, Any]]):
    row = turned_round["Without it TaH2 is less accurate: training decisions"]
    assert not row["holds"]
    assert row["paper"] == "-1.3 points"
    assert row["ours"].startswith("+")


def test_that_the_data_cannot_tell_is_no_proof_of_likeness(as_published: dict[str, dict[str, Any]]):
    """So few problems leave differences of many points open."""
    for claim in (
        "Ouro M=4 gains less than 2 points over Ouro M=2",
        "Under a ceiling of 12 TaH2 M=8 stays as accurate, within 2 points",
    ):
        assert not as_published[claim]["holds"]


@pytest.mark.parametrize(("low", "high", "holds"), [(-0.01, 0.01, True), (-0.03, 0.01, False), (-0.01, 0.03, False)])
def test_likeness_is_shown_by_a_narrow_interval(
    as_published: dict[str, dict[str, Any]],
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
    low: float,
    high: float,
    holds: bool,
):
    monkeypatch.setattr("tah2.study.numbers.gain", lambda *_: Interval((low + high) / 2, low, high))
    found = {claim.claim: claim.holds for claim in other_ceilings(load_results(published), "tah2-m2")}
    assert found["Under a ceiling of 12 TaH2 M=8 stays as accurate, within 2 points"] == holds
    plateau = {claim.claim: claim.holds for claim in fixed_loops_plateau(load_results(published), "tah2-m2")}
    assert plateau["Ouro M=4 gains less than 2 points over Ouro M=2"] == (high < 0.02)


def test_one_deep_model_is_enough_against_all_are_shallow(tmp_path: Path):
    root = synthetic_study(tmp_path, VARIANTS[:1] + VARIANTS[8:9])
    path = root / "units" / "tah2-m2-b0-s0" / "grades.jsonl"
    rows = [json.loads(line) | {"depth": 1.5} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (claim,) = shallow_on_average(load_results(root), "tah2-m2")
    assert mean_depth(load_results(root).of("tah2-m2")) < 1.35
    assert not claim.holds


def band(tokens: int, low: float, high: float) -> dict[str, Any]:
    return {
        "low": 0,
        "high": 1,
        "tokens": tokens,
        "probability": 0.5,
        "gain": (low + high) / 2,
        "interval": [low, high],
    }


@pytest.mark.parametrize(
    ("stopped", "near", "holds"),
    [
        ((-2.0, -1.0), (-0.05, 0.05), [True, True]),
        ((-0.1, 0.05), (-3.0, 3.0), [False, False]),
        ((-0.1, 0.005), (-0.3, -0.2), [True, False]),
    ],
)
def test_the_decider_is_judged_by_whole_intervals(
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped: tuple[float, float],
    near: tuple[float, float],
    holds: list[bool],
):
    depth = {"depth": 1, "tokens": 30, "bands": [], "correlation": None, "continued": band(10, 0.5, 1.0)}
    depth |= {"stopped": band(15, *stopped), "near_threshold": band(5, *near)}
    monkeypatch.setattr(claims_tokens, "analyses_of", lambda *_: [{"threshold": 0.5, "depths": [depth]}])
    found = claims_tokens.the_decider_knows(load_results(published), "tah2-m2")
    assert [claim.holds for claim in found] == holds


@pytest.mark.parametrize(("rounds", "holds"), [([1.2, 1.3], True), ([1.2, 2.1], False)])
def test_time_is_saved_where_every_round_saves_it(tmp_path: Path, rounds: list[float], holds: bool):
    root = synthetic_study(tmp_path, (VARIANTS[0], VARIANTS[6], VARIANTS[8]), responses=False)
    latency = {"standard": [1.0, 1.0], "tah2-fixed-m2": [2.0, 2.0], "tah2-m2": rounds}
    rows = [
        {"variant": name, "batch": 1, "latency_seconds": sum(values) / 2, "latency_rounds": values}
        for name, values in latency.items()
    ]
    (root / "runtime.json").write_text(json.dumps({"rows": rows}))
    (claim,) = claims_tokens.slower_by_less_than_fixed(load_results(root), "tah2-m2")
    assert claim.holds == holds


def test_what_the_study_does_not_run_is_not_claimed(tmp_path: Path):
    few = tuple(made for made in VARIANTS if made.name in ("standard", "tah2-m2"))
    found = claims(tmp_path, few)
    assert not any("Ouro" in claim or "Huginn" in claim or "M = 4" in claim for claim in found)
    assert CERTAIN[0] in found


def test_without_responses_losses_are_still_judged(tmp_path: Path):
    summary = summarise(load_results(synthetic_study(tmp_path, VARIANTS[:1] + VARIANTS[8:10], responses=False)))
    assert summary["matched_compute"] == []
    assert [row["accuracy"] for row in summary["variants"]] == [None] * 3
    assert {row["claim"] for row in summary["claims"]} >= {"TaH2 M=2 has a lower validation loss than Standard"}


def test_matched_compute_names_both_sides(tmp_path: Path):
    summary = summarise(load_results(synthetic_study(tmp_path)))
    pairs = [(row["name"], row["against"]) for row in summary["matched_compute"]]
    assert ("tah2-m2", "standard") in pairs
    assert ("tah2-m2", "huginn-m3") in pairs
    for row in summary["matched_compute"]:
        low, high = row["interval"]
        assert low <= row["gain"] <= high
        assert row["gain"] == pytest.approx(row["accuracy"] - row["accuracy_against"])


def test_a_mean_budget_may_be_spent_with_two_cutoffs():
    """Against every mixture of two cutoffs, tried one by one."""
    compute, accuracy = np.array([4.0, 6.0, 10.0]), np.array([0.0, 0.5, 0.6])
    x, y = np.array([0.0, *compute]), np.array([0.0, *accuracy])
    for budget in (1.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0):
        shares = np.linspace(0, 1, 2001)[:, None, None]
        cost = shares * x[:, None] + (1 - shares) * x
        right = shares * y[:, None] + (1 - shares) * y
        tried = right[cost <= budget + 1e-9].max()
        assert best_within(compute, accuracy, np.array(budget)) == pytest.approx(tried, abs=1e-3)
    assert best_within(compute, accuracy, np.array(3.0)) == pytest.approx(0.25)
    rows = best_within(np.stack([compute, compute]), np.stack([accuracy, accuracy]), np.array([3.0, 20.0]))
    assert rows.tolist() == pytest.approx([0.25, 0.6])
