"""Recipes as commands read them; how they are composed is told in `tah2.config.recipe`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar

from tah2.config.recipe import load_recipe, parse_overrides
from tah2.config.strict import build, plain

__all__ = ["RecipeCall", "load_recipe", "parse_overrides"]

FLAGS = ("--show", "-h", "--help")
"""May stand anywhere on the command line; every other word behind the recipe is an override."""

T = TypeVar("T")


class RecipeCall:
    """A command line of the form RECIPE KEY=VALUE ..., as `tah2 sft` and `tah2 distill` have it."""

    def __init__(self, command: str, description: str, argv: list[str]) -> None:
        parser = argparse.ArgumentParser(
            prog=command,
            usage=f"{command} [-h] [--show] RECIPE [KEY=VALUE ...]",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("recipe", metavar="RECIPE", type=Path, help="a YAML recipe; KEY=VALUE: values over its own")
        parser.add_argument("--show", action="store_true", help="print the whole recipe as it would run, and stop")
        words = [word for word in argv if word not in FLAGS]
        arguments = parser.parse_args([*(word for word in argv if word in FLAGS), *words[:1]])
        self.path: Path = arguments.recipe
        self.overrides, self.show = words[1:], bool(arguments.show)

    def config(self, kind: type[T], out: str) -> T:
        """The recipe with its overrides as a `kind`; results go into the folder `out` where it names none."""
        recipe = load_recipe(self.path, self.overrides)
        recipe.setdefault("out", out)
        return build(kind, recipe)


def print_config(config: object) -> int:
    """What `--show` prints."""
    import yaml

    print(yaml.safe_dump(plain(config), sort_keys=False), end="")
    return 0
