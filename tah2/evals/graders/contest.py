"""LiveCodeBench: whole programs and methods against tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tah2.evals.graders.grader import Answered, Grader, Request
from tah2.evals.sandbox import BUSY, Limits
from tah2.evals.task import Grade, Problem


def request(problem: Problem, response: Answered) -> Request:
    row = problem.data
    return {
        "response": response.text,
        "fn_name": row["fn_name"],
        "public_test_cases": row["public_test_cases"],
        "private_test_cases": row.get("private_test_cases"),
    }


def verdict(problem: Problem, reply: Mapping[str, Any]) -> Grade:
    return Grade(float(reply["passed"] == reply["tests"] > 0), reply["failure"])


def limits(requests: Sequence[Request]) -> Limits:
    """One slow test ends the run, so a little more than its limit is ample, plus time to run a hundred quick ones."""
    return Limits(wall_seconds=BUSY * 60, cpu_seconds=60, memory_mb=4096, file_mb=256)


LIVECODEBENCH = Grader(
    "livecodebench",
    request,
    verdict,
    "tah2.evals.graders.inside.contest:check",
    preload=("tah2.evals.graders.inside.contest", "statistics", "decimal"),
    limits=limits,
)
