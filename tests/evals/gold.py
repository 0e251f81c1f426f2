"""For every task: a response that is right because it is the gold answer, and one that must be wrong."""

from __future__ import annotations

import json
from typing import Any

from tah2.evals.graders.grader import Said
from tah2.evals.graders.mathematics import gold_answer
from tah2.evals.task import Problem, Task

LETTERS = "ABCDEFGHIJ"


def gold_response(task: Task, problem: Problem) -> Any:
    return _of(task)[0](problem)


def corrupted_response(task: Task, problem: Problem) -> Any:
    return _of(task)[1](problem)


def _of(task: Task) -> Any:
    kinds = {
        "math": (boxed_gold, boxed_wrong),
        "choice": (letter, next_letter),
        "humaneval": (humaneval, returns_nothing),
        "mbpp": (mbpp, returns_nothing),
        "livecodebench": (answers_by_table, answers_by_table_but_last),
        "bfcl_v3": (gold_calls, calls_less_one),
        "bfcl_v4": (gold_calls, calls_less_one),
    }
    return kinds[task.grader]


def boxed_gold(problem: Problem) -> str:
    return f"<think>\nMaybe \\boxed{{-1}}?\n</think>\n\nThe answer is \\boxed{{{gold_answer(problem)}}}."


def boxed_wrong(problem: Problem) -> str:
    gold = gold_answer(problem)
    wrong = str(int(gold) + 1) if gold.lstrip("-").isdigit() else "-987654321"
    return f"<think>\nMaybe \\boxed{{{gold}}}?\n</think>\n\nThe answer is \\boxed{{{wrong}}}."


def letter(problem: Problem) -> str:
    return f"<think>\nAnswer: Z</think>\nLet me explain.\n\nAnswer: {problem.data['answer']}"


def next_letter(problem: Problem) -> str:
    options = LETTERS[: len(problem.data["options"])]
    wrong = options[(options.index(problem.data["answer"]) + 1) % len(options)]
    return f"<think>\nAnswer: {problem.data['answer']}</think>\nLet me explain.\n\nAnswer: {wrong}"


def fenced(code: str) -> str:
    return f"Here is the solution.\n\n```python\n{code}\n```\n\nIt passes."


def humaneval(problem: Problem) -> str:
    """EvalPlus' reference where it is at hand: a few of the original ones fail its plus tests."""
    reference = problem.data.get("plus") or problem.data
    return fenced(problem.data["prompt"] + reference["canonical_solution"])


def mbpp(problem: Problem) -> str:
    return fenced(problem.data["code"])


def returns_nothing(problem: Problem) -> str:
    return fenced(f"def {problem.data['entry_point']}(*args, **kwargs):\n    return 'certainly not'")


def answers_by_table(problem: Problem) -> str:
    return fenced(_table(problem, problem.data["public_test_cases"]))


def answers_by_table_but_last(problem: Problem) -> str:
    tests = problem.data["public_test_cases"]
    wrong = "-987654321" if problem.data["fn_name"] else f"{tests[-1]['output']}\n-987654321"
    return fenced(_table(problem, [*tests[:-1], {**tests[-1], "output": wrong}]))


def _table(problem: Problem, tests: list[dict[str, str]]) -> str:
    """A program that has learned the tests by heart."""
    known = {test["input"].strip(): test["output"] for test in tests}
    name = problem.data["fn_name"]
    if not name:
        return f"import sys\nprint({known!r}[sys.stdin.read().strip()])"
    return (
        f"class Solution:\n    def {name}(self, *args):\n"
        f"        key = json.dumps(args)\n"
        f"        return json.loads({_by_arguments(known)!r}[key])"
    )


def _by_arguments(known: dict[str, str]) -> dict[str, str]:
    return {json.dumps([json.loads(line) for line in given.split("\n")]): output for given, output in known.items()}


def gold_calls(problem: Problem) -> Said:
    return Said("", {"turns": [[calls] if calls else [] for calls in problem.data["ground_truth"]]})


def calls_less_one(problem: Problem) -> Said:
    """Without the calls of the last turn that has any."""
    turns = gold_calls(problem).extra["turns"]
    last = max(place for place, steps in enumerate(turns) if steps)
    return Said("", {"turns": [*turns[:last], [], *turns[last + 1 :]]})
