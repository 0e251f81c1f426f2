"""Responses to public benchmarks, for studies of models that can answer them: `tah2 eval`, then its graders."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tah2.config.strict import ConfigError
from tah2.study.layout import EVAL, GradeRow
from tah2.study.ledger import digest_records
from tah2.study.plan import Unit

if TYPE_CHECKING:
    from tah2.study.shop import Shop


def evaluate_command(shop: Shop, unit: Unit) -> list[str]:
    """The `tah2 eval` of one unit; it goes on by itself where it was stopped."""
    section, asked = shop.plan.study.evaluate, shop.plan.study.generate
    words = [*section.command, str(shop.root / unit.model), "--tasks", ",".join(section.tasks)]
    words += ["--out", str(shop.root / unit.folder / EVAL), "--label", unit.id]
    words += ["--max-tokens", str(asked.max_tokens), "--batch", str(asked.batch), "--seed", str(asked.seed)]
    words += ["--max-depth", str(unit.ceiling)] if unit.of is not None else []
    words += ["--data-dir", str(section.data_dir)] if section.data_dir is not None else []
    return [*words, *section.options]


def evaluate_unit(shop: Shop, unit: Unit) -> str:
    from tah2.evals.records import RecordFile

    words = evaluate_command(shop, unit)
    code = subprocess.run(words, check=False).returncode
    if code:
        raise ConfigError(f"Evaluation failed (exit code {code}): {shlex.join(words)}")
    folder = shop.root / unit.folder / EVAL
    return digest_records(record for path in folder.glob("samples/*.jsonl") for record in RecordFile(path).read())


def grade_benchmarks(shop: Shop, unit: Unit) -> Iterator[GradeRow]:
    """The graders' verdicts as rows of the study."""
    from tah2.evals.grade_run import GradedRun
    from tah2.study.stages.respond import flops_model, grade_row

    section, cutoffs = shop.plan.study.evaluate, shop.plan.study.generate.cutoffs
    run, flops = GradedRun(shop.root / unit.folder / EVAL, section.data_dir), flops_model(shop, unit)
    for task in run.loaded:
        records = run.records(task)
        run.grade(records, section.workers, task)
        for record in records:
            grade = run.grade_of(record)
            yield grade_row(
                record,
                flops,
                cutoffs,
                correct=grade.correct >= 0.5,
                exact=grade.correct >= 0.5,
                finished=record.finish_reason == "stop",
                answer=str(grade.answer) if getattr(grade, "answer", None) else "",
            )
