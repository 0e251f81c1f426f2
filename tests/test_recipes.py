"""Recipes build strictly, hold the published values, and differ from each other in what they name alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tah2.cli.recipe import load_recipe
from tah2.config.backbone import BackboneConfig, preset
from tah2.config.strict import build, plain
from tah2.data.budget import BudgetConfig, DataSize, resolve_steps
from tah2.model.loop import LoopedDecoder
from tah2.train.config import TrainConfig
from tah2.train.schemes import scheme_for

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
PAPER = sorted((RECIPES / "paper").glob("*.yaml"), key=lambda path: path.stem)
LAPTOP = sorted(path for path in (RECIPES / "laptop").glob("*.yaml") if "loop" in load_recipe(path))
TINY = BackboneConfig("qwen3", 128, 16, 20, 4, 4, 2, 6, qk_norm=True)

MAIN = "1.7b-tah2-m2"
STAGE_ONE = "1.7b-tah-oracle-m2"
DIFFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.7b-standard": (MAIN, {"loop.kind": "standard", "loop.max_depth": 1}),
    "1.7b-tah2-m4": (MAIN, {"loop.max_depth": 4}),
    "1.7b-tah2-m8": (MAIN, {"loop.max_depth": 8}),
    "1.7b-tah2-fixed-m2": (MAIN, {"loop.kind": "tah2-fixed"}),
    "1.7b-tah2-fixed-m4": (MAIN, {"loop.kind": "tah2-fixed", "loop.max_depth": 4}),
    "1.7b-ouro-m2": (MAIN, {"loop.kind": "ouro"}),
    "1.7b-ouro-m4": (MAIN, {"loop.kind": "ouro", "loop.max_depth": 4}),
    "1.7b-ouro-m2-gate": (
        "1.7b-ouro-m2",
        {
            "model.path": "runs/1.7b-ouro-m2/model",
            "loop.kind": "ouro-adaptive",
            "optimizer.learning_rate": 1e-4,
            "budget.epochs": 1.0,
        },
    ),
    "1.7b-huginn-m3": (MAIN, {"loop.kind": "huginn", "loop.max_depth": 3}),
    "1.7b-huginn-m7": (MAIN, {"loop.kind": "huginn", "loop.max_depth": 7}),
    "1.7b-tah2-m2-mismatch-labels": (MAIN, {"objective.labels": "top1-mismatch"}),
    "1.7b-tah2-m2-uniform-weights": (MAIN, {"objective.weights": "uniform"}),
    "1.7b-tah2-m2-full-coverage": (MAIN, {"objective.coverage": 1.0}),
    "1.7b-tah2-m2-sampled": (MAIN, {"objective.decisions": "sampled"}),
    "1.7b-tah2-m2-top100-embedding": (MAIN, {"loop.reentry": "top-k-embedding"}),
    "1.7b-tah2-m2-last-output": (MAIN, {"loop.output": "last"}),
    STAGE_ONE: (MAIN, {"loop.reentry": "top-k-embedding", "loop.output": "last", "objective.scheme": "oracle"}),
    "1.7b-tah-decider-m2": (
        STAGE_ONE,
        {"model.path": f"runs/{STAGE_ONE}/model", "objective.scheme": "decider-only"},
    ),
    "4b-tah2-m2": ("4b-standard", {"loop.kind": "tah2", "loop.max_depth": 2}),
    "8b-tah2-m2": ("8b-standard", {"loop.kind": "tah2", "loop.max_depth": 2}),
    "8b-standard": ("4b-standard", {"model.path": "Qwen/Qwen3-8B-Base"}),
}
"""Recipe -> the recipe beside which it is set, and every field in which it departs from that one."""


def config_of(path: Path) -> TrainConfig:
    return build(TrainConfig, {"out": f"runs/{path.stem}", **load_recipe(path)})


def paper(name: str) -> TrainConfig:
    return config_of(RECIPES / "paper" / f"{name}.yaml")


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted name."""
    if not isinstance(value, dict):
        return {where: value}
    pairs = [(f"{where}.{key}" if where else key, entry) for key, entry in value.items()]
    return {name: leaf for key, entry in pairs for name, leaf in flat(entry, key).items()}


def fields(config: TrainConfig) -> dict[str, Any]:
    found = flat(plain(config))
    del found["out"]
    return found


def test_every_published_run_has_a_recipe_and_every_recipe_is_held_to_another():
    assert {path.stem for path in PAPER} == {*DIFFERENCES, MAIN, "4b-standard"}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_variants_differ_in_the_named_fields_alone(name: str):
    other, expected = DIFFERENCES[name]
    ours, theirs = fields(paper(name)), fields(paper(other))
    names = {*ours, *theirs}
    assert {key: ours.get(key) for key in names if ours.get(key) != theirs.get(key)} == expected


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_published_values_reach_every_paper_run(path: Path):
    config = config_of(path)
    stage_two = path.stem == "1.7b-ouro-m2-gate"
    assert config.data is not None
    assert (config.batch.samples, config.data.max_tokens, config.data.validation_samples) == (128, 16384, 1000)
    assert config.data.cache_dir is not None, "tokenising so much again in every process takes hours"
    optimizer = config.optimizer
    assert optimizer.learning_rate == (1e-4 if stage_two else 4e-5)
    assert (optimizer.max_gradient_norm, optimizer.warmup_ratio, optimizer.minimum_ratio) == (1.0, 0.03, 0.1)
    assert config.objective.coverage == (1.0 if path.stem.endswith("full-coverage") else 0.99)
    assert config.objective.decider_coefficient == 0.05
    assert config.loop is not None
    assert config.loop.exit_threshold == 0.5
    assert config.loop.embedding_top_k == 100
    assert config.system.precision == "bf16"
    if path.stem.startswith("1.7b"):
        assert config.budget == BudgetConfig(epochs=1.0 if stage_two else 3.0)
    else:
        assert config.budget == BudgetConfig(tokens_per_parameter=2.0)
    assert {source.id for source in config.data.sources} == {
        "a-m-team/AM-Qwen3-Distilled",
        "nvidia/Nemotron-Agentic-v1",
    }


def test_the_main_runs_read_273_thousand_samples():
    data = paper(MAIN).data
    assert data is not None
    assert sum(source.limit or 0 for source in data.sources) == 273_000


def test_three_epochs_of_the_main_data_are_two_tokens_per_parameter():
    """The paper gives both: 3.4 billion tokens, and TPP = 2 of 1.72 billion parameters."""
    size = DataSize(tokens_per_sample=3.4e9 / 3 / 273_000, samples=273_000)
    by_epochs = resolve_steps(paper(MAIN).budget, size, 128)
    assert by_epochs == pytest.approx(resolve_steps(paper("4b-standard").budget, size, 128, 1_720_570_000), rel=0.02)


def test_huginn_loops_layers_8_to_21_of_28():
    config = paper("1.7b-huginn-m3")
    assert config.loop is not None
    layers = preset("qwen3-1.7b").num_layers
    assert LoopedDecoder(replace(TINY, num_layers=layers), config.loop).looped == range(7, 21)


@pytest.mark.parametrize("path", [*PAPER, *LAPTOP], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_loop_can_be_trained_by_the_scheme_that_its_recipe_asks_for(path: Path):
    config = config_of(path)
    assert config.loop is not None
    scheme = scheme_for(LoopedDecoder(TINY, config.loop), config.objective)
    trains_gate_alone = path.stem in ("1.7b-ouro-m2-gate", "1.7b-tah-decider-m2")
    assert scheme.freezes_backbone == trains_gate_alone


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_recipes_set_no_option_that_their_loop_ignores(path: Path):
    config = config_of(path)
    assert config.loop is not None
    given = set(load_recipe(path)["loop"]) - {"exit_threshold"}  # the table of hyper-parameters gives it for all
    assert not given & set(LoopedDecoder(TINY, config.loop).kind.unused_options())
