"""BFCL multi-turn: the official checker, on back ends of the version that the data was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tah2.evals.graders.grader import Answered, Grader, Package, Request
from tah2.evals.sandbox import BUSY, Limits
from tah2.evals.task import Grade, Problem

ENTRY = ("id", "category", "initial_config", "involved_classes")
PACKAGES = {
    "v3": Package("bfcl-eval", "2025.8.6.2", "bfcl_eval", no_deps=True, own_folder=True),
    "v4": Package("bfcl-eval", "2026.3.23", "bfcl_eval", no_deps=True, own_folder=True),
}
"""Version of the data -> the package whose back ends it was made for; with the other, gold calls raise errors."""


def request(problem: Problem, response: Answered) -> Request | Grade:
    """An episode that was cut short has failed; what it did is in `extra` (`tah2.evals.episode`)."""
    if "turns" not in response.extra:
        return Grade(0.0, "no episode: this task is played turn by turn")
    if response.extra.get("ending", "done") != "done":
        return Grade(0.0, f"episode ended early: {response.extra['ending']}")
    entry = {name: problem.data[name] for name in (*ENTRY, "ground_truth")}
    return {"entry": entry, "turns": response.extra["turns"]}


def verdict(problem: Problem, reply: Mapping[str, Any]) -> Grade:
    return Grade(float(reply["valid"]), reply["reason"])


def limits(requests: Sequence[Request]) -> Limits:
    return Limits(wall_seconds=BUSY * 20, cpu_seconds=20 + len(requests), memory_mb=1024, processes=8)


def grader(version: str) -> Grader:
    return Grader(
        f"bfcl_{version}",
        request,
        verdict,
        "tah2.evals.graders.inside.tools:check",
        packages=(PACKAGES[version], Package("mpmath", "1.3.0", "mpmath")),
        preload=("tah2.evals.graders.inside.tools", *BACK_ENDS),
        limits=limits,
        batch=8,
    )


_FOLDER = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
BACK_ENDS = tuple(
    f"{_FOLDER}.{name}"
    for name in (
        "gorilla_file_system",
        "math_api",
        "message_api",
        "posting_api",
        "ticket_api",
        "trading_bot",
        "travel_booking",
        "vehicle_control",
    )
)
BFCL_V3, BFCL_V4 = grader("v3"), grader("v4")
