"""Programs that are run against tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tah2.evals.prompts import (
    CODE_STOP,
    FENCE_STOP,
    complete_function_prompt,
    contest_prompt,
    write_function_prompt,
)
from tah2.evals.sources import Companions, Hub, Row, Source, json_lines, pick
from tah2.evals.task import Problem, Task


def humaneval_problem(row: Mapping[str, Any]) -> Problem:
    messages, text = complete_function_prompt(row["prompt"])
    return Problem(row["id"], messages, text, row)


def mbpp_problem(row: Mapping[str, Any]) -> Problem:
    messages, text = write_function_prompt(row["text"], row["test_list"][0], row["entry_point"])
    return Problem(row["id"], messages, text, row)


def contest_problem(row: Mapping[str, Any]) -> Problem:
    messages, text = contest_prompt(row)
    return Problem(row["id"], messages, text, row)


def evalplus_inputs(file: str) -> Companions:
    """Joins EvalPlus' inputs to the rows as `plus`, where its file lies in the folder."""

    def join(rows: list[Row], folder: Path) -> tuple[str, ...]:
        path = folder / "evalplus" / file
        if not path.is_file():
            return (f"no plus tests: evalplus/{file} is absent",)
        plus = {row["task_id"]: row for row in json_lines(gzip.decompress(path.read_bytes()), str(path))}
        for row in rows:
            row["plus"] = plus.get(row["id"])
        return ()

    return join


def public_tests_only(rows: list[Row], folder: Path) -> tuple[str, ...]:
    """Public tests alone accept too many programs, so a score from them says so."""
    return () if all(row.get("private_test_cases") for row in rows) else ("public tests only",)


def humaneval(row: Mapping[str, Any], number: int) -> Row:
    names = ("prompt", "entry_point", "test", "canonical_solution")
    return {"id": pick(row, "task_id"), **{name: pick(row, name) for name in names}}


def mbppplus(row: Mapping[str, Any], number: int) -> Row:
    """EvalPlus' table: `test` is a program that holds the plus tests."""
    code, tests = pick(row, "code"), pick(row, "test_list")
    return {
        "id": f"Mbpp/{str(pick(row, 'task_id')).rsplit('/', 1)[-1]}",
        "text": pick(row, "prompt"),
        "entry_point": tested_function(code, tests),
        "test_imports": row.get("test_imports") or [],
        "test_list": tests,
        "code": code,
        "canonical_solution": code,
        "plus_test": pick(row, "test"),
    }


def tested_function(code: str, tests: list[str]) -> str:
    """The name that the reference defines and the tests call."""
    defined = [line[len("def ") :].split("(", 1)[0].strip() for line in code.split("\n") if line.startswith("def ")]
    called = [name for name in defined if any(f"{name}(" in test for test in tests)]
    return (called or defined)[-1]


def livecodebench(row: Mapping[str, Any], number: int) -> Row:
    public = json.loads(pick(row, "public_test_cases"))
    return {
        "id": pick(row, "question_id"),
        "title": row.get("question_title"),
        "problem": pick(row, "question_content"),
        "starter_code": row.get("starter_code") or "",
        "testtype": public[0]["testtype"],
        "fn_name": json.loads(row.get("metadata") or "{}").get("func_name"),
        "public_test_cases": [{"input": case["input"], "output": case["output"]} for case in public],
        "private_test_cases": row.get("private_test_cases"),
        **{name: row.get(name) for name in ("platform", "difficulty", "contest_id", "contest_date")},
    }


TASKS = (
    Task(
        "humaneval",
        "HumanEval",
        "code",
        164,
        8,
        Source(
            "humaneval.jsonl",
            Hub("openai/openai_humaneval", humaneval),
            companions=evalplus_inputs("HumanEvalPlus-v0.1.10.jsonl.gz"),
        ),
        humaneval_problem,
        "humaneval",
        text_stop=CODE_STOP,
    ),
    Task(
        "mbpp",
        "MBPP",
        "code",
        378,
        8,
        Source(
            "mbpp.jsonl",
            Hub("evalplus/mbppplus", mbppplus),
            companions=evalplus_inputs("MbppPlus-v0.2.0.jsonl.gz"),
        ),
        mbpp_problem,
        "mbpp",
        text_stop=('\n"""', "\nassert ", "\nprint(", "\nif __name__", "\n```"),
    ),
    Task(
        "livecodebench_v6",
        "LiveCodeBench v6",
        "code",
        175,
        4,
        Source(
            "livecodebench_v6.jsonl",
            Hub("livecodebench/code_generation_lite", livecodebench, files=("test6.jsonl",)),
            companions=public_tests_only,
        ),
        contest_problem,
        "livecodebench",
        text_stop=FENCE_STOP,
    ),
)
