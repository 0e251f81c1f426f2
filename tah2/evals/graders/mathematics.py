"""Mathematics: math-verify in the sandbox, gold first; answers that are sentences by their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tah2.evals.graders.grader import Answered, Grader, Package, Request
from tah2.evals.graders.responses import after_thinking, clean_gold, last_boxed, same_words
from tah2.evals.sandbox import BUSY, Limits
from tah2.evals.task import Grade, Problem

SECONDS = 8
"""Of processor time for one comparison; most take a few milliseconds."""
TAIL = 20_000
"""Characters of a response that are searched for an answer, counted from its end."""


def gold_answer(problem: Problem) -> str:
    gold = problem.data["answer"]
    return clean_gold(", ".join(gold) if isinstance(gold, (list, tuple)) else str(gold))


def request(problem: Problem, response: Answered) -> Request | Grade:
    gold = gold_answer(problem)
    text = after_thinking(response.text)[-TAIL:]
    boxed = last_boxed(text)
    if boxed is not None and same_words(boxed, gold):
        return Grade(1.0, "same words", gold)
    if not text.strip():
        return Grade(0.0, "no answer")
    return {"gold": gold, "response": text, "tolerance": float(problem.data.get("error") or 0)}


def verdict(problem: Problem, reply: Any) -> Grade:
    """All right answers share the gold's form, so that votes for them add up."""
    if reply["correct"]:
        return Grade(1.0, "", gold_answer(problem))
    return Grade(0.0, "" if reply["answer"] is not None else "no answer", reply["answer"])


def limits(requests: Sequence[Request]) -> Limits:
    """A batch that one response holds up is judged again one by one, so it need not wait for long."""
    seconds = SECONDS + len(requests) // 2
    return Limits(wall_seconds=BUSY * seconds, cpu_seconds=seconds, memory_mb=1024, processes=8)


MATH = Grader(
    "math",
    request,
    verdict,
    "tah2.evals.graders.inside.maths:check",
    packages=(Package("math-verify", "0.9.0", "math_verify"),),
    preload=("tah2.evals.graders.inside.maths", "sympy"),
    limits=limits,
    batch=16,
)
