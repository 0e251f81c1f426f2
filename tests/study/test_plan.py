"""A study file becomes units and stages in an order that works, or is refused with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.study.config import load_study
from tah2.study.plan import Plan, at_rate, plan_study
from tah2.study.runner import chosen_stages
from tests.study.mini import mini, write_study


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_study(mini(tmp_path_factory.mktemp("mini")))


def test_units_are_variants_with_their_seeds(plan: Plan):
    assert list(plan.bases) == ["tiny-b0", "tiny-b1"]
    names = [unit.id for unit in plan.units.values() if unit.group != "search"]
    assert names == [
        "standard-b0-s0",
        "standard-b1-s0",
        "ouro-m2-b0-s0",
        "ouro-m2-b1-s0",
        "ouro-gate-b0-s0",
        "tah2-m2-b0-s0",
        "tah2-m2-b1-s0",
        "tah2-at-3-b0-s0",
    ]


def test_every_stage_comes_after_what_it_needs(plan: Plan):
    place = {name: index for index, name in enumerate(plan.tasks)}
    for task in plan.tasks.values():
        assert all(place[need] < place[task.id] for need in task.needs), task.id
    assert plan.tasks["train:ouro-gate-b0-s0"].needs == ("base:tiny-b0", "train:ouro-m2-b0-s0")
    assert plan.tasks["validate:tah2-at-3-b0-s0"].needs == ("train:tah2-m2-b0-s0",)
    assert "train:tah2-at-3-b0-s0" not in plan.tasks


def test_a_search_is_one_run_per_rate_and_others_take_its_choice(plan: Plan):
    searched = [unit for unit in plan.units.values() if unit.group == "search"]
    assert [unit.recipe["optimizer"]["learning_rate"] for unit in searched] == [0.01, 0.02]
    names = tuple(unit.id for unit in searched)
    for unit in ("standard-b0-s0", "standard-b1-s0", "ouro-m2-b1-s0"):
        assert plan.units[unit].candidates == names
    assert plan.units["tah2-m2-b0-s0"].candidates == ()


def test_the_gate_keeps_its_ratio_to_the_learning_rate():
    recipe = {"optimizer": {"learning_rate": 1e-3, "gate_learning_rate": 5e-3}, "seed": 1}
    assert at_rate(recipe, 2e-3) == {"optimizer": {"learning_rate": 2e-3, "gate_learning_rate": 1e-2}, "seed": 1}
    assert at_rate({}, 2e-3) == {"optimizer": {"learning_rate": 2e-3}}


def test_seeds_reach_training_and_its_data(plan: Plan):
    recipe = plan_study(mini_with_seeds(plan, [0, 7])).units["tah2-m2-b1-s7"].recipe
    assert (recipe["seed"], recipe["procedural"]["seed"]) == (7, 7)


def mini_with_seeds(plan: Plan, seeds: list[int]) -> Any:
    from dataclasses import replace

    return replace(plan.study, seeds=tuple(seeds))


def test_chosen_variants_bring_what_they_need(tmp_path: Path):
    study = mini(tmp_path)
    assert set(plan_study(study, ["tah2-at-3"]).units) == {"tah2-at-3-b0-s0", "tah2-m2-b0-s0"}
    gate = plan_study(study, ["ouro-gate"])
    assert set(gate.units) >= {"ouro-gate-b0-s0", "ouro-m2-b0-s0", "search-standard-lr0.01-b0-s0"}
    assert "standard-b0-s0" not in gate.units
    assert set(gate.bases) == {"tiny-b0"}
    assert {unit.variant for unit in plan_study(study, ["tah2-*"]).units.values()} == {"tah2-m2", "tah2-at-3"}


def test_what_the_study_says_of_all_holds_over_the_files_of_one(tmp_path: Path):
    (tmp_path / "shared.yaml").write_text("budget: {steps: 10}\noptimizer: {learning_rate: 0.1}\n", encoding="utf-8")
    (tmp_path / "own.yaml").write_text("extends: shared.yaml\nloop: {kind: ouro}\n", encoding="utf-8")
    path = tmp_path / "study.yaml"
    path.write_text(
        "title: t\nbaseline: a\nbases: {b: {path: x}}\n"
        "recipe: {extends: shared.yaml, budget: {steps: 20}}\n"
        "variants: {a: {title: A, recipe: {extends: own.yaml, optimizer: {learning_rate: 0.3}}}}\n",
        encoding="utf-8",
    )
    recipe = load_study(path).variants["a"].recipe
    assert recipe == {"budget": {"steps": 20}, "optimizer": {"learning_rate": 0.3}, "loop": {"kind": "ouro"}}
    assert load_study(path, {"recipe": {"budget": {"steps": 5}}}).variants["a"].recipe["budget"] == {"steps": 5}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"baseline": "standrad"}, "baseline: unknown variant 'standrad'; did you mean 'standard'"),
        ({"variants": {"tah2-m2": {"recipee": {}}}}, "Unknown key 'variants.tah2-m2.recipee'; did you mean 'recipe'"),
        ({"variants": {"tah2-m2": {"group": "mian"}}}, "did you mean 'main'"),
        ({"variants": {"tah2-at-3": {"of": "tah2-m3"}}}, "unknown variant 'tah2-m3'; did you mean 'tah2-m2'"),
        ({"variants": {"tah2-at-3": {"ceiling": None}}}, "'of' and 'ceiling' go together"),
        ({"variants": {"ouro-m2": {"rate_of": "tah2-m2"}}}, "'tah2-m2' does not search"),
        ({"variants": {"ouro-m2": {"base_seeds": [5]}}}, "its base has no seed 5"),
        ({"generate": {"cutoffs": [99]}}, "Cutoffs lie between 1 and max_tokens"),
        ({"generate": {"fit_to": 5}}, "'fit_to' (5) leaves fewer than two cutoffs"),
        ({"variants": {"standard": {"recipe": {"budgets": {}}}}}, "Unknown key 'budgets'; did you mean 'budget'"),
    ],
)
def test_mistakes_are_told_in_one_sentence(tmp_path: Path, change: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as caught:
        plan_study(mini(tmp_path, change))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variants_that_need_each_other_are_refused(tmp_path: Path):
    change = {"variants": {"ouro-m2": {"after": "ouro-gate", "base_seeds": [0]}}}
    with pytest.raises(ConfigError, match="circle: ouro-m2 -> ouro-gate -> ouro-m2"):
        mini(tmp_path, change)


def test_a_stage_that_is_none_is_refused():
    assert chosen_stages([]) >= {"base", "report"}
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        chosen_stages(["trian"])


def test_a_study_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="Cannot read"):
        load_study(tmp_path / "nothing.yaml")


def test_overrides_reach_the_study(tmp_path: Path):
    path = write_study(tmp_path)
    assert load_study(path, {"generate": {"problems": 3}}).generate.problems == 3
