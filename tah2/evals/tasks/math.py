"""Competition and word problems whose answer is an expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tah2.evals.prompts import TEXT_STOP, math_prompt
from tah2.evals.sources import Hub, Row, Source, pick
from tah2.evals.task import Problem, Task


def math_problem(row: Mapping[str, Any]) -> Problem:
    context = row.get("context")
    asked = f"{context}\n\n{row['problem']}" if context else row["problem"]
    messages, text = math_prompt(asked)
    return Problem(row["id"], messages, text, row)


def whole_number(value: Any) -> str:
    """`27.0`, 27 and "027" are the same answer, "27"; anything else stays as it is written."""
    text = str(value).strip()
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        return str(int(float(text))) if float(text).is_integer() else text
    except ValueError:
        return text


def competition(name: str) -> Any:
    """Columns of the AIME and AMC copies, which call the problem now `problem`, now `question`."""

    def rename(row: Mapping[str, Any], number: int) -> Row:
        return {
            "id": f"{name}-{number + 1:02d}",
            "problem": pick(row, "problem", "question", "Problem"),
            "answer": whole_number(pick(row, "answer", "Answer")),
        }

    return rename


def math500(row: Mapping[str, Any], number: int) -> Row:
    fields = {name: pick(row, name) for name in ("problem", "answer", "subject", "level")}
    return {"id": pick(row, "unique_id", "id"), **fields}


def olympiadbench(row: Mapping[str, Any], number: int) -> Row:
    names = ("is_multiple_answer", "answer_type", "unit", "error", "subfield", "context")
    optional = {name: row.get(name) for name in names}
    answer = pick(row, "final_answer", "answer")
    return {
        "id": f"olympiadbench-{pick(row, 'id')}",
        "problem": pick(row, "question", "problem"),
        "answer": answer if isinstance(answer, list) else [answer],
        **optional,
    }


def imo_answerbench(row: Mapping[str, Any], number: int) -> Row:
    return {
        "id": pick(row, "Problem ID", "id"),
        "problem": pick(row, "Problem", "problem"),
        "answer": pick(row, "Short Answer", "answer"),
        "category": row.get("Category"),
    }


def gsm8k(row: Mapping[str, Any], number: int) -> Row:
    solution = pick(row, "answer")
    return {
        "id": f"gsm8k-test-{number:04d}",
        "problem": pick(row, "question"),
        "answer": solution.rsplit("####", 1)[-1].strip().replace(",", ""),
        "solution": solution,
    }


def _task(name: str, title: str, count: int, repeats: int, hub: Hub, caveat: str = "") -> Task:
    source = Source(f"{name}.jsonl", hub)
    return Task(name, title, "math", count, repeats, source, math_problem, "math", text_stop=TEXT_STOP, caveat=caveat)


TASKS = (
    _task("aime24", "AIME 2024", 30, 32, Hub("HuggingFaceH4/aime_2024", competition("aime24"), split="train")),
    _task("aime25", "AIME 2025", 30, 32, Hub("math-ai/aime25", competition("aime25"))),
    _task("aime26", "AIME 2026", 30, 32, Hub("math-ai/aime26", competition("aime26"))),
    _task("amc23", "AMC 2023", 40, 32, Hub("math-ai/amc23", competition("amc23"))),
    _task("math500", "MATH500", 500, 4, Hub("HuggingFaceH4/MATH-500", math500)),
    _task("olympiadbench", "OlympiadBench", 675, 4, Hub("math-ai/olympiadbench", olympiadbench)),
    _task(
        "imo_answerbench",
        "IMO-AnswerBench",
        400,
        4,
        Hub("Hwilner/imo-answerbench", imo_answerbench, split="train"),
        caveat="graded by rule: right answers to problems whose gold is a sentence may be missed",
    ),
    _task("gsm8k", "GSM8K", 1319, 1, Hub("openai/gsm8k", gsm8k, config="main")),
)
