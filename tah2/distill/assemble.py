"""Answers on disk -> training and validation rows, in the order of the sources, and a report of the rest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tah2.config.strict import plain
from tah2.distill.asking import Failure
from tah2.distill.book import AnswerBook
from tah2.distill.config import DistillConfig
from tah2.distill.judging import Judge, Rejected, Verdict
from tah2.distill.plan import Plan
from tah2.distill.prompts import Prompt, PromptReader
from tah2.distill.report import REFUSED, UNANSWERED, DistillReport

TRAIN, VALIDATION, REPORT = "train.jsonl", "validation.jsonl", "report.json"
MOST_HELD_OUT = 0.1
"""`held_out` takes at most this share of the rows, so that a small run is not held out whole."""

Grader = Callable[[Prompt, Sequence[Mapping[str, Any]]], list[Verdict | None]]
"""The verdicts on the answers to one prompt; None where nothing is to be judged."""


def assemble(
    config: DistillConfig,
    plan: Plan,
    reader: PromptReader,
    book: AnswerBook,
    grade: Grader,
    failures: Mapping[str, Failure],
) -> DistillReport:
    """Write the three files, each whole or not at all; `failures` say why answers are missing."""
    report, judge = plan.report, Judge(config)
    owners: list[str] = []
    with replaced(config.out / "rows.jsonl") as everything:
        for prompt in reader.selected(plan.places):
            for values, tokens in _rows(config, prompt, judge, book, grade, failures, report):
                everything.write(_line(values))
                owners.append(prompt.key)
                report.tokens += tokens or 0
                report.uncounted += tokens is None
    held_out = choose_held_out(owners, config.held_out, config.sampling.seed)
    report.rows = split_rows(config.out, owners, held_out)
    (config.out / "rows.jsonl").unlink()
    with replaced(config.out / REPORT) as file:
        settings = {key: value for key, value in plain(config).items() if key != "out"}
        file.write(json.dumps({**report.to_dict(), "recipe": settings}, indent=2).encode() + b"\n")
    return report


def _rows(
    config: DistillConfig,
    prompt: Prompt,
    judge: Judge,
    book: AnswerBook,
    grade: Grader,
    failures: Mapping[str, Failure],
    report: DistillReport,
) -> Iterator[tuple[dict[str, Any], int | None]]:
    """The rows of one prompt; why it has none goes into the report."""
    answers = [answer for sample in range(config.sampling.samples) if (answer := book.read((prompt.key, sample)))]
    failure = failures.get(prompt.key)
    report.missing_answers += failure is not None and not failure.refused
    if not answers:
        reason = REFUSED if failure is not None and failure.refused else UNANSWERED
        report.drop(reason, prompt.where, "" if failure is None else failure.reason)
        return
    try:
        rows = judge.rows(prompt, answers, grade(prompt, answers))
    except Rejected as rejected:
        report.drop(rejected.reason, prompt.where, rejected.detail)
        return
    report.kept[prompt.source] += 1
    for row in rows:
        yield row.values, row.tokens


def choose_held_out(owners: Sequence[str], count: int, seed: int) -> set[str]:
    """Prompts whose rows are held out, about `count` rows: those whose digest with the seed is smallest.

    A function of seed and prompts alone, so that sets of different teachers hold out the same prompts where they
    have kept the same.
    """
    count = min(count, int(len(owners) * MOST_HELD_OUT))
    ranked = sorted(owners, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    return set(ranked[:count])


def split_rows(out: Path, owners: Sequence[str], held_out: set[str]) -> dict[str, int]:
    """Divide rows.jsonl; returns the number of rows of each file."""
    counts = {TRAIN: 0, VALIDATION: 0}
    with (
        replaced(out / TRAIN) as train,
        replaced(out / VALIDATION) as validation,
        (out / "rows.jsonl").open("rb") as rows,
    ):
        for owner, line in zip(owners, rows, strict=True):
            (validation if owner in held_out else train).write(line)
            counts[VALIDATION if owner in held_out else TRAIN] += 1
    return counts


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` that takes its place once it is whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"
