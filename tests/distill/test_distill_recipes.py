"""The shipped recipes: the paper's numbers, and variants that differ in what their names say alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tah2.cli import main
from tah2.config.recipe import load_recipe
from tah2.config.strict import build, plain
from tah2.distill.config import DistillConfig
from tah2.train.config import TrainConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TEACHERS = {
    "qwen3-8b": ("paper", "Qwen/Qwen3-8B"),
    "qwen3-32b": ("paper-32b", "Qwen/Qwen3-32B"),
    "qwen3-235b-a22b": ("paper-235b-a22b", "Qwen/Qwen3-235B-A22B"),
}


def distillation(name: str) -> DistillConfig:
    return build(DistillConfig, load_recipe(RECIPES / "distill" / f"{name}.yaml"))


def training(path: Path) -> TrainConfig:
    return build(TrainConfig, {"out": "x", **load_recipe(path)})


def test_the_papers_numbers():
    paper = distillation("paper")
    assert sum(source.limit or 0 for source in paper.sources) == 273_000
    assert {source.id for source in paper.sources} == {"a-m-team/AM-Qwen3-Distilled", "nvidia/Nemotron-Agentic-v1"}
    assert (paper.filter.max_tokens, paper.held_out) == (16_384, 1000)
    assert (paper.sampling.temperature, paper.sampling.top_p, paper.sampling.top_k) == (0.6, 0.95, 20)
    assert paper.decontaminate is not None
    assert paper.decontaminate.benchmarks == ("all",)
    assert paper.decontaminate.words == 13


def test_the_prompts_are_those_of_the_runs_on_original_responses():
    data = training(RECIPES / "paper" / "1.7b-standard.yaml").data
    assert data is not None
    assert distillation("paper").sources == data.sources


@pytest.mark.parametrize("student", TEACHERS)
def test_teachers_differ_in_themselves_alone_and_students_in_their_data(student: str):
    name, model = TEACHERS[student]
    ours, paper = plain(distillation(name)), plain(distillation("paper"))
    assert ours["teacher"]["endpoint"]["model"] == model
    assert ours["teacher"]["name"] == model.removeprefix("Qwen/")
    for recipe in (ours, paper):
        del recipe["out"], recipe["teacher"]["name"], recipe["teacher"]["endpoint"]["model"]
    assert ours == paper

    trained = plain(training(RECIPES / "paper" / "teachers" / f"{student}.yaml"))
    standard = plain(training(RECIPES / "paper" / "1.7b-standard.yaml"))
    out = distillation(name).out
    (source,), (validation,) = trained["data"].pop("sources"), trained["data"].pop("validation_sources")
    assert (source["path"], validation["path"]) == (str(out / "train.jsonl"), str(out / "validation.jsonl"))
    for recipe in (trained, standard):
        del recipe["out"]
    del standard["data"]["sources"], standard["data"]["validation_sources"]
    assert trained == standard


@pytest.mark.parametrize("path", sorted((RECIPES / "distill").glob("*.yaml")), ids=lambda path: path.stem)
def test_show_prints_every_recipe_as_it_would_run(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["distill", str(path), "sampling.max_tokens=7", "--show"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["sampling"]["max_tokens"] == 7
    assert shown["out"] == plain(build(DistillConfig, load_recipe(path) | {"out": shown["out"]}))["out"]
    assert build(DistillConfig, shown).sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sampling.temprature=1", "did you mean 'temperature'?"),
        ("teacher.endpoint.url=localhost", "must begin with http"),
        ("filter.choose=best", "must be one of"),
        ("teacher.recorded=true", "Name one teacher"),
    ],
)
def test_mistakes_are_named_in_one_sentence(override: str, sentence: str, capfd: pytest.CaptureFixture[str]):
    assert main(["distill", str(RECIPES / "distill" / "paper.yaml"), override]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("tah2: ")
    assert sentence in line


def test_the_comparison_of_teachers_is_a_study(capsys: pytest.CaptureFixture[str]):
    assert main(["study", str(RECIPES / "studies" / "teachers.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(student in said for student in TEACHERS)
    assert "aime24,aime25,aime26" in said
