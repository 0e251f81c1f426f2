"""Verdicts on responses, kept beside the samples: `grades.jsonl`.

A verdict belongs to a response's content, not to its place: the same text (or the same tool calls) of the same problem
is judged once, whatever run length it was cut from. What judged it (task version, grader packages, data) is part of
its name, so a newer grader never finds the verdicts of an older one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tah2.evals.records import SampleRecord, drop_torn_line, read_json_lines
from tah2.evals.run_plan import json_digest
from tah2.evals.task import Grade

FILE_NAME = "grades.jsonl"
BESIDE = ("calls", "completion_tokens", "error")
"""Parts of a record's `extra` that no grader reads."""


def content_digest(record: SampleRecord) -> str:
    """What a grader sees of a response, as a short name."""
    story = {name: value for name, value in record.extra.items() if name not in BESIDE}
    seen = json.dumps([record.text, story], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(seen.encode("ascii")).hexdigest()[:20]


def undecided(grade: Grade) -> bool:
    """The grader broke down (a broken installation, for instance); this says nothing about the response."""
    from tah2.evals.graders.grader import GRADER_FAILED

    return grade.note.startswith(GRADER_FAILED)


@dataclass
class GradeFile:
    """All verdicts of one run that the present graders gave."""

    path: Path
    judges: Mapping[str, Mapping[str, Any]]
    """Per task, what decides its verdicts: versions of task, data and packages."""
    _known: dict[tuple[str, str, str], Grade] = field(default_factory=dict, init=False)
    _file: BinaryIO | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._names = {task: json_digest(judge) for task, judge in self.judges.items()}
        for line in read_json_lines(self.path):
            if self._names.get(line["task"]) == line["judge"]:
                grade = Grade(line["correct"], line["note"], line["answer"], line["parts"])
                self._known[line["task"], line["problem"], line["content"]] = grade

    def find(self, record: SampleRecord) -> Grade | None:
        return self._known.get((record.task, record.problem, content_digest(record)))

    def add(self, record: SampleRecord, grade: Grade) -> None:
        """Keep a verdict; one that its grader failed to give counts for now, and is sought again next time."""
        content = content_digest(record)
        self._known[record.task, record.problem, content] = grade
        if undecided(grade):
            return
        line = {
            "task": record.task,
            "problem": record.problem,
            "repeat": record.repeat,
            "tokens": len(record.token_ids),
            "correct": float(grade.correct),
            "answer": grade.answer,
            "note": grade.note,
            "parts": dict(grade.parts),
            "content": content,
            "judge": self._names[record.task],
        }
        if self._file is None:
            drop_torn_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        self._file.write(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __enter__(self) -> GradeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
