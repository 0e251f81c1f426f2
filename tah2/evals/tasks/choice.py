"""Multiple choice: a letter is the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tah2.evals.prompts import TEXT_STOP, choice_prompt
from tah2.evals.sources import Hub, Row, Source, pick
from tah2.evals.task import Problem, Task

LETTERS = "ABCDEFGHIJ"


def choice_problem(row: Mapping[str, Any]) -> Problem:
    """Options in the order of the row; the gold letter is `answer`."""
    messages, text = choice_prompt(row["question"], row["options"], LETTERS)
    return Problem(row["id"], messages, text, row)


def gpqa_problem(row: Mapping[str, Any]) -> Problem:
    """The correct option stands first in the source, so options are shuffled, alike in every run.

    Letters depend on the id of the question alone: repeats and models see the same order.
    """
    order = list(range(4))
    random.Random(f"gpqa:{row['id']}").shuffle(order)
    options = [row["correct_answer"], *row["incorrect_answers"]]
    shuffled = {"id": row["id"], "question": row["question"], "options": [options[place] for place in order]}
    return choice_problem({**shuffled, "answer": LETTERS[order.index(0)]})


def gpqa(row: Mapping[str, Any], number: int) -> Row:
    return {
        "id": pick(row, "Record ID"),
        "question": pick(row, "Question"),
        "correct_answer": pick(row, "Correct Answer"),
        "incorrect_answers": [pick(row, f"Incorrect Answer {number}") for number in (1, 2, 3)],
        "domain": row.get("High-level domain"),
        "subdomain": row.get("Subdomain"),
    }


def supergpqa_hard(row: Mapping[str, Any], number: int) -> Row | None:
    if pick(row, "difficulty") != "hard":
        return None
    fields = {name: pick(row, name) for name in ("question", "options", "difficulty")}
    return {"id": pick(row, "uuid"), "answer": pick(row, "answer_letter"), **fields}


TASKS = (
    Task(
        "gpqa",
        "GPQA Diamond",
        "qa",
        198,
        8,
        Source(
            "gpqa_diamond.jsonl.zip",
            Hub("Idavidrein/gpqa", gpqa, config="gpqa_diamond", split="train", gated=True),
            password=b"deserted-untie-orchid",
        ),
        gpqa_problem,
        "choice",
        text_stop=TEXT_STOP,
    ),
    Task(
        "supergpqa",
        "SuperGPQA Hard",
        "qa",
        7050,
        4,
        Source("supergpqa_hard.jsonl", Hub("m-a-p/SuperGPQA", supergpqa_hard, split="train")),
        choice_problem,
        "choice",
        text_stop=TEXT_STOP,
    ),
    Task(
        "supergpqa_sample",
        "SuperGPQA (300 of all difficulties)",
        "qa",
        300,
        4,
        Source("supergpqa_sample.jsonl", None),
        choice_problem,
        "choice",
        text_stop=TEXT_STOP,
        caveat="300 questions of all difficulties: not SuperGPQA Hard and no number to compare with it",
    ),
)
