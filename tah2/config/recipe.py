"""Recipes: YAML files that may extend each other, and overrides from the command line.

    extends: base.yaml          # or a list, later files over earlier ones; paths are relative to this file
    loop:
      max_depth: 4

The result is a plain mapping. Whether its keys exist, and whether their values fit, is decided where the
configuration is built (`tah2.config.strict.build`), which names the nearest known key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from tah2.config.strict import ConfigError, merge, read_mapping

EXTENDS = "extends"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe at `path` with everything it extends beneath it and `overrides` on top.

    An override is `loop.max_depth=8`, `--loop.max-depth=8` or the two words `--loop.max-depth 8`; its value is
    read as YAML.
    """
    return merge(_compose(Path(path), ()), parse_overrides(overrides))


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Overrides as a nested mapping; a later word wins over an earlier one."""
    merged: dict[str, Any] = {}
    remaining = iter(words)
    for word in remaining:
        name, equals, text = word.partition("=")
        if name.startswith("--"):
            name = name.removeprefix("--").replace("-", "_")
            text = text if equals else next(remaining, "")
            if not equals and not text:
                raise ConfigError(f"Override {word!r} needs a value, as in '{word} VALUE'.")
        elif not equals:
            raise ConfigError(f"Cannot read override {word!r}; write KEY=VALUE, for example loop.max_depth=8.")
        merged = merge(merged, _nested(name, text, word))
    return merged


def _nested(name: str, text: str, word: str) -> dict[str, Any]:
    keys = name.split(".")
    if not all(keys):
        raise ConfigError(f"Cannot read override {word!r}; its key has an empty part.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(
            f"The value of override {word!r} is not valid YAML; quote it, as in KEY='\"text\"'."
        ) from None
    for key in reversed(keys):
        value = {key: value}
    return value


def _compose(path: Path, open_files: tuple[Path, ...]) -> dict[str, Any]:
    """The mapping at `path` over those it extends; `open_files` are the recipes that lead here."""
    identity = path.resolve()
    if identity in open_files:
        chain = " -> ".join(file.name for file in (*open_files, identity))
        raise ConfigError(f"Recipes extend each other in a circle: {chain}; remove one 'extends'.")
    own = read_mapping(path)
    parents = own.pop(EXTENDS, [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path.name}: 'extends' must be a file name or a list of file names, not {parents!r}.")
    layers = [_compose(path.parent / parent, (*open_files, identity)) for parent in parents]
    return reduce(merge, [*layers, own], {})
