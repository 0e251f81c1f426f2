"""What is made of a study's results: functions by name, run by the stages `analyse` and `report`.

A function is named `module:function`, imported when it is run, and takes the study's folder, which it reads through
`load_results`. Analyses write under `analyses/`, a report under `report/`.
"""

from __future__ import annotations

import importlib
from typing import Any

from tah2.config.strict import ConfigError

ANALYSES = ("tah2.study.analyses.stage:run_analyses",)
REPORT = ("tah2.study.report.write:write_report",)
VERSION = 3
"""Raise it when analyses or report would write other things from the same results."""


def version_of(stage: str) -> list[str | int]:
    """Part of the stage's key."""
    return [VERSION, *(ANALYSES if stage == "analyse" else REPORT)]


def imported(name: str) -> Any:
    """What `module:name` names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be imported ({error}); name it as 'module:function'.") from None
