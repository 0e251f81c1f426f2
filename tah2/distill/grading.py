"""Which answers are right, as a benchmark's grader says; every verdict is kept, so none is asked for twice.

The gold answer comes from the prompt's own row. Verdicts are keyed by it too: a corrected gold answer is graded anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tah2.distill.book import AnswerBook
from tah2.distill.config import DistillConfig, GradeConfig
from tah2.distill.judging import Rejected, Verdict, check_answer
from tah2.distill.prompts import Prompt
from tah2.evals.records import drop_torn_line, read_json_lines
from tah2.evals.task import Problem, Task
from tah2.evals.tasks import task_named

CHUNK = 1024
"""Answers that one start of the grader's workers judges."""

Item = tuple[str, Problem, str]
"""A verdict's key, the problem and the response."""


class Verdicts:
    """Verdicts by answer, in a file that grows."""

    def __init__(self, path: Path, config: GradeConfig) -> None:
        self.path, self.config = path, config
        self.task: Task = task_named(config.task)
        if path.exists():
            drop_torn_line(path)
        self._known = {line["answer"]: (bool(line["correct"]), line["note"]) for line in read_json_lines(path)}

    def __call__(self, prompt: Prompt, answers: Sequence[Mapping[str, Any]]) -> list[Verdict | None]:
        """What is known of the answers to one prompt; None for those that nobody can grade and that are to be kept."""
        found: list[Verdict | None] = []
        for answer in answers:
            item = self.item(prompt, answer)
            if item is None:
                found.append(None if self.config.ungraded == "keep" else (False, "its row has no gold answer"))
            else:
                found.append(self._known.get(item[0]))
        return found

    def item(self, prompt: Prompt, answer: Mapping[str, Any]) -> Item | None:
        """What to grade; None where the row lacks a column that `config.columns` names."""
        gold = {name: prompt.row.get(column) for name, column in self.config.columns.items()}
        if any(value is None for value in gold.values()):
            return None
        problem = Problem(prompt.key, tuple(prompt.messages), "", {**prompt.row, **gold})
        text = "" if not answer["messages"] else str(answer["messages"][-1]["content"])
        identity = json.dumps(
            [prompt.key, answer["sample"], self.task.name, self.task.version, gold, text], default=str
        )
        return hashlib.sha256(identity.encode()).hexdigest()[:24], problem, text

    def grade(self, prompts: Iterable[Prompt], book: AnswerBook, samples: int, min_characters: int) -> None:
        """Judge every answer that could become a row and has no verdict yet."""
        from tah2.evals.graders import grade_many

        waiting = self._waiting(prompts, book, samples, min_characters)
        with self.path.open("ab") as file:
            while items := list(islice(waiting, CHUNK)):
                pairs = [(problem, text) for _, problem, text in items]
                grades = grade_many(self.task, pairs, workers=max(1, min(8, os.cpu_count() or 1)))
                for (name, _, _), verdict in zip(items, grades, strict=True):
                    correct, note = verdict.correct == 1, verdict.note
                    self._known[name] = correct, note
                    line = json.dumps({"answer": name, "task": self.task.name, "correct": correct, "note": note})
                    file.write(line.encode("ascii") + b"\n")
                file.flush()

    def _waiting(
        self, prompts: Iterable[Prompt], book: AnswerBook, samples: int, min_characters: int
    ) -> Iterator[Item]:
        for prompt in prompts:
            for sample in range(samples):
                answer = book.read((prompt.key, sample))
                if answer is None or not could_be_a_row(answer, min_characters):
                    continue
                item = self.item(prompt, answer)
                if item is not None and item[0] not in self._known:
                    yield item


def could_be_a_row(answer: Mapping[str, Any], min_characters: int) -> bool:
    try:
        check_answer(answer, min_characters)
    except Rejected:
        return False
    return True


def ungraded(prompt: Prompt, answers: Sequence[Mapping[str, Any]]) -> list[Verdict | None]:
    """Where no grader is asked for."""
    return [None] * len(answers)


def open_verdicts(config: DistillConfig) -> Verdicts | None:
    return None if config.filter.grade is None else Verdicts(config.out / "grades.jsonl", config.filter.grade)
