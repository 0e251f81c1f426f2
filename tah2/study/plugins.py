"""What is made of a study's results: functions by name, run by the stages `analyse` and `report`.

An analysis writes files under `DIR/analyses`, the report under `DIR/report`. Both read through `load_results` alone.
A function is named `module:function` and imported when it is run; it takes (results, folder).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.study.layout import Results

ANALYSES: tuple[str, ...] = ()
REPORT: tuple[str, ...] = ()
VERSION = 1
"""Raise it when analyses or report would write other things from the same results."""


def version_of(stage: str) -> list[str | int]:
    """Part of the stage's key."""
    return [VERSION, *(ANALYSES if stage == "analyse" else REPORT)]


def plugged(name: str) -> Callable[[Results, Path], None]:
    found: Callable[[Results, Path], None] = imported(name)
    return found


def imported(name: str) -> Any:
    """What `module:name` names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be imported ({error}); name it as 'module:function'.") from None
