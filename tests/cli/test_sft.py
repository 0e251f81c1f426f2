"""`tah2 sft`: recipes resolve, mistakes are named, help is instant."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tah2.cli import main
from tah2.config.strict import build
from tah2.train.config import TrainConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TRAINED, SHARED = ("laptop", "paper", "pocket"), ("chase", "smollm2", "post")
RUNNABLE = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name in TRAINED and path.stem not in SHARED)


@pytest.mark.parametrize("recipe", RUNNABLE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_show_prints_the_resolved_recipe(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["sft", str(recipe), "--show"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["out"] == f"runs/{recipe.stem}"
    assert set(shown) == {"out", *TrainConfig.__dataclass_fields__}
    assert build(TrainConfig, shown).loop is not None


@pytest.mark.parametrize("place", [0, 2])
def test_show_may_stand_anywhere_and_overrides_win(place: int, capsys: pytest.CaptureFixture[str]):
    words = [str(RECIPES / "laptop" / "chase-tah2.yaml"), "loop.max_depth=4", "--out", "elsewhere"]
    words.insert(place, "--show")
    assert main(["sft", *words]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["loop"]["max_depth"], shown["out"]) == (4, "elsewhere")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("loop.max_dpth=4", "did you mean 'max_depth'?"),
        ("optimiser.learning_rate=1", "did you mean 'optimizer'?"),
        ("objective.labels=gain", "known:"),
        ("budget.steps=many", "budget.steps"),
        ("loop.kind=tah", "did you mean"),
    ],
)
def test_mistakes_are_named_in_one_sentence(override: str, sentence: str, capfd: pytest.CaptureFixture[str]):
    recipe = RECIPES / "laptop" / "chase-base.yaml"
    assert main(["sft", str(recipe), override, "--show"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("tah2: ")
    assert sentence in line


def test_help_stands_anywhere(capsys: pytest.CaptureFixture[str]):
    for words in (["--help"], ["recipe.yaml", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(["sft", *words])
        assert end.value.code == 0
        assert "KEY=VALUE" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sft", "distill"])
def test_the_usage_asks_for_a_recipe_alone(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([command])
    assert end.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == f"usage: tah2 {command} [-h] [--show] RECIPE [KEY=VALUE ...]"
    assert error.endswith("required: RECIPE")
