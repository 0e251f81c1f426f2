"""A distillation from its recipe to its files.

    OUT/answers.jsonl     every answer of the teacher, as it came; the only file that cannot be made again for nothing
    OUT/run.json          what must stay the same while answers are added: teacher and sampling
    OUT/grades.jsonl      verdicts of the grader, where the recipe asks for them
    OUT/train.jsonl       the training data, in the order of the sources
    OUT/validation.jsonl  the rows held out of it
    OUT/report.json       what became of every prompt

The last three are made anew from these by every run, so filters may change; the same command run again asks
for what is missing and nothing else.
"""

from __future__ import annotations

import json
from typing import Any

from tah2.config.strict import ConfigError, plain
from tah2.distill.asking import ask
from tah2.distill.assemble import assemble, replaced
from tah2.distill.benchmarks import open_benchmarks
from tah2.distill.book import AnswerBook
from tah2.distill.config import DistillConfig
from tah2.distill.decontaminate import ContaminationReport
from tah2.distill.grading import open_verdicts, ungraded
from tah2.distill.plan import Taint, make_plan
from tah2.distill.prompts import Prompt, PromptReader
from tah2.distill.report import DistillReport
from tah2.distill.teachers import Teacher, open_teacher

ANSWERS, IDENTITY = "answers.jsonl", "run.json"


class Watch:
    """What a command line shows meanwhile; this one shows nothing."""

    def planned(self, report: DistillReport, total: int, answered: int) -> None:
        """`total` answers are wanted, of which `answered` are there."""

    def answered(self, tokens: int) -> None:
        """One more, of so many tokens."""

    def stage(self, name: str) -> None:
        """What is answered is answered; now comes `name`."""


def distill(config: DistillConfig, watch: Watch | None = None, teacher: Teacher | None = None) -> DistillReport:
    """Plan, ask, assemble; `teacher` stands in for the one that `config` names."""
    watch = watch or Watch()
    reader = PromptReader(config.sources)
    verdicts = open_verdicts(config)
    contamination, taint = contamination_of(config)
    plan = make_plan(config, reader, taint)
    if contamination is not None:
        contamination.rows = plan.report.read.total()
        plan.report.contamination = contamination.to_dict()
    if not plan.places:
        raise ConfigError(f"No prompt is left to ask. {' '.join(plan.report.lines())}")
    keep_identity(config)
    with AnswerBook(config.out / ANSWERS) as book:
        watch.planned(plan.report, len(plan.places) * config.sampling.samples, len(book))
        failures = ask(
            config, teacher or open_teacher(config.teacher), reader.selected(plan.places), book, watch.answered
        )
        if verdicts is not None:
            watch.stage("grading")
            limits = config.sampling.samples, config.filter.min_characters
            verdicts.grade(reader.selected(plan.places), book, *limits)
        watch.stage("writing rows")
        return assemble(config, plan, reader, book, verdicts or ungraded, failures)


def contamination_of(config: DistillConfig) -> tuple[ContaminationReport | None, Taint]:
    """Where to note prompts that a benchmark holds, and how to find them; (None, nothing) where nobody asked for it."""
    wanted = config.decontaminate
    if wanted is None:
        return None, lambda prompt: None
    compared = open_benchmarks(wanted.benchmarks, wanted.data_dir, wanted.words)
    report = ContaminationReport.of(compared)

    def taint(prompt: Prompt) -> str | None:
        hit = next(filter(None, map(compared.index.find, prompt.asked)), None)
        if hit is not None:
            report.add(prompt.where, prompt.id, hit)
        return None if hit is None else hit.benchmark

    return report, taint


def identity(config: DistillConfig) -> dict[str, Any]:
    """What all answers in one folder share. More samples, other prompts and other filters may come later."""
    sampling: dict[str, Any] = plain(config.sampling)
    del sampling["samples"]
    return {"teacher": config.teacher.asked, "sampling": sampling, "tool_results": config.tool_results}


def keep_identity(config: DistillConfig) -> None:
    """Refuse a folder whose answers another teacher gave, or the same one otherwise."""
    path, ours = config.out / IDENTITY, identity(config)
    if not path.exists():
        config.out.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(json.dumps(ours, indent=2).encode() + b"\n")
        return
    theirs = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in ours if ours[name] != theirs.get(name)]
    if changed:
        raise ConfigError(
            f"{config.out} holds answers given under another {' and '.join(repr(name) for name in changed)}: "
            "choose another 'out', or take back the change."
        )
