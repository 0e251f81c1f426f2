"""A batch of requests to one check, in one room: for graders that run no program and are quick."""

from __future__ import annotations

from typing import Any

from tah2.evals.sandbox.zygote import harness_named


def run(request: dict[str, Any]) -> list[Any]:
    check = harness_named(request["check"])
    return [check(item) for item in request["items"]]
