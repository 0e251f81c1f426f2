"""Multiple choice: the letter that the response settles on, read by rule."""

from __future__ import annotations

from tah2.evals.graders.grader import Answered, Grader
from tah2.evals.graders.responses import chosen_letter
from tah2.evals.task import Grade, Problem

LETTERS = "ABCDEFGHIJ"


def judge(problem: Problem, response: Answered) -> Grade:
    letter = chosen_letter(response.text, LETTERS[: len(problem.data["options"])])
    if letter is None:
        return Grade(0.0, "no answer")
    return Grade(float(letter == problem.data["answer"]), "", letter)


CHOICE = Grader("choice", here=judge)
