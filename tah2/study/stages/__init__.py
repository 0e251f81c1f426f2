"""What every stage does: a function of the workshop, its task, its key and a listener -> a digest of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tah2.study.plan import Task
from tah2.study.stages.measure import measure_runtime
from tah2.study.stages.respond import generate_unit, grade_unit
from tah2.study.stages.training import train_base, train_unit
from tah2.study.stages.validation import validate_unit
from tah2.study.stages.write import analyse_study, report_study

if TYPE_CHECKING:
    from tah2.study.shop import Shop, Tell

STAGE_FUNCTIONS: dict[str, Callable[[Shop, Task, str, Tell], str]] = {
    "base": train_base,
    "train": train_unit,
    "validate": validate_unit,
    "generate": generate_unit,
    "grade": grade_unit,
    "runtime": measure_runtime,
    "analyse": analyse_study,
    "report": report_study,
}
