"""Recipes compose, overrides win, and mistakes are named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tah2.cli.recipe import load_recipe, parse_overrides
from tah2.config.strict import ConfigError, build


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_extends_another_deeply(tmp_path: Path):
    write(tmp_path, "base.yaml", "loop: {kind: tah2, max_depth: 2}\nsteps: 10\n")
    top = write(tmp_path, "top.yaml", "extends: base.yaml\nloop: {max_depth: 4}\n")
    assert load_recipe(top) == {"loop": {"kind": "tah2", "max_depth": 4}, "steps": 10}


def test_later_parents_win_and_paths_are_relative_to_the_file(tmp_path: Path):
    write(tmp_path, "parts/common.yaml", "a: 0\n")
    write(tmp_path, "parts/first.yaml", "extends: common.yaml\na: 1\nb: 1\n")
    write(tmp_path, "second.yaml", "b: 2\nc: 2\n")
    top = write(tmp_path, "top.yaml", "extends: [parts/first.yaml, second.yaml]\nc: 3\n")
    assert load_recipe(top) == {"a": 1, "b": 2, "c": 3}


def test_a_parent_may_be_shared(tmp_path: Path):
    write(tmp_path, "root.yaml", "a: 0\n")
    write(tmp_path, "left.yaml", "extends: root.yaml\nb: 1\n")
    write(tmp_path, "right.yaml", "extends: root.yaml\nc: 2\n")
    top = write(tmp_path, "top.yaml", "extends: [left.yaml, right.yaml]\n")
    assert load_recipe(top) == {"a": 0, "b": 1, "c": 2}


def test_a_circle_is_refused(tmp_path: Path):
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle: a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe(tmp_path / "a.yaml")


def test_a_missing_parent_is_named(tmp_path: Path):
    top = write(tmp_path, "top.yaml", "extends: gone.yaml\n")
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_recipe(top)


def test_extends_must_be_file_names(tmp_path: Path):
    top = write(tmp_path, "top.yaml", "extends: {a: 1}\n")
    with pytest.raises(ConfigError, match="'extends' must be a file name"):
        load_recipe(top)


def test_overrides_lie_on_top(tmp_path: Path):
    top = write(tmp_path, "top.yaml", "loop: {kind: tah2, max_depth: 2}\nsteps: 10\n")
    recipe = load_recipe(top, ["loop.max_depth=8", "--steps", "20", "--loop.exit-threshold=0.25"])
    assert recipe == {"loop": {"kind": "tah2", "max_depth": 8, "exit_threshold": 0.25}, "steps": 20}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x=3", 3),
        ("x=true", True),
        ("x=null", None),
        ("x=[1, 2]", [1, 2]),
        ("x=a=b", "a=b"),
        ("x='3'", "3"),
        ("x=", None),
    ],
)
def test_override_values_are_yaml(word: str, value: object):
    assert parse_overrides([word]) == {"x": value}


def test_the_last_override_wins():
    assert parse_overrides(["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize("word", ["steps", "--steps", "a..b=1", "=1", "a={"])
def test_unreadable_overrides_are_named(word: str):
    with pytest.raises(ConfigError, match="verride"):
        parse_overrides([word])


keys = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)
values = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.lists(st.integers(), max_size=3))


@given(st.lists(keys, min_size=1, max_size=4), values)
def test_any_value_survives_the_command_line(path: list[str], value: object):
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
    found: object = parse_overrides([f"{'.'.join(path)}={text}"])
    for key in path:
        assert isinstance(found, dict)
        found = found[key]
    assert found == value


@dataclass(frozen=True)
class Loop:
    max_depth: int = 2


@dataclass(frozen=True)
class Recipe:
    rate: float = 1.0
    loop: Loop = field(default_factory=Loop)


def test_building_a_recipe_coerces_values_and_names_the_nearest_key(tmp_path: Path):
    top = write(tmp_path, "top.yaml", "rate: 1e-5\n")
    assert build(Recipe, load_recipe(top, ["loop.max_depth=4"])) == Recipe(1e-5, Loop(4))
    with pytest.raises(ConfigError, match=r"'loop\.max_dpth'; did you mean 'max_depth'\?"):
        build(Recipe, load_recipe(top, ["loop.max_dpth=4"]))


@dataclass(frozen=True)
class Values:
    rate: float = 0.0
    steps: int = 0
    weights: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("rate=.nan", "rate must be a float, not nan"),
        ("rate=nan", "rate must be a float, not 'nan'"),
        ("steps=.inf", "steps must be an int, not inf"),
        ("steps=.nan", "steps must be an int, not nan"),
        ("steps=1.5", "steps must be an int, not 1.5"),
        ("weights={a: .nan}", r"weights\.a must be a float"),
    ],
)
def test_numbers_that_are_none_are_refused(word: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        build(Values, parse_overrides([word]))


def test_whole_numbers_are_exact_and_infinity_is_a_rate():
    assert build(Values, parse_overrides([f"steps={2**60 + 1}", "rate=.inf"])) == Values(float("inf"), 2**60 + 1)


def test_names_may_look_like_numbers():
    assert build(Values, {"weights": {101: 4}}) == Values(weights={"101": 4.0})
