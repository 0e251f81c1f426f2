"""BFCL's official checker and simulated back ends.

Both evaluate the calls that a model wrote, and keep the state of a conversation in module globals under a name. Every
room is a fresh process, and every use in it takes a name of its own, so no sample can start from another's state.
"""

from __future__ import annotations

import uuid
from typing import Any

from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call


def check(request: dict[str, Any]) -> dict[str, Any]:
    """`turns[turn][step]` is a list of call strings; steps without calls are left out."""
    entry, turns = request["entry"], request["turns"]
    if len(turns) != len(entry["ground_truth"]):
        return {"valid": False, "reason": f"{len(turns)} of {len(entry['ground_truth'])} turns"}
    verdict = multi_turn_checker(turns, entry["ground_truth"], entry, entry["category"], fresh_name())
    return {"valid": bool(verdict["valid"]), "reason": verdict.get("error_type", "")}


def execute(request: dict[str, Any]) -> list[str]:
    """What the last step's calls return, after all steps before it were run again from the start."""
    entry, name = request["entry"], fresh_name()
    results: list[str] = []
    for calls in request["steps"]:
        results = execute_multi_turn_func_call(
            calls,
            entry["initial_config"],
            entry["involved_classes"],
            name,
            entry["id"],
            long_context="long_context" in entry["category"],
        )[0]
    return results


def fresh_name() -> str:
    return f"run{uuid.uuid4().hex}"
