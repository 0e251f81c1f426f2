"""Which rows are asked: every prompt once, none that a benchmark holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tah2.data.report import BadRow
from tah2.distill.config import DistillConfig
from tah2.distill.episode import uses_results
from tah2.distill.prompts import Place, Prompt, PromptReader, read_prompt
from tah2.distill.report import DistillReport

Taint = Callable[[Prompt], str | None]
"""Why a prompt may not be asked, as a benchmark's name; None where it may."""


@dataclass
class Plan:
    places: dict[Place, str] = field(default_factory=dict)
    """Where the prompts to ask stand, in the order of the sources -> their keys."""
    report: DistillReport = field(default_factory=DistillReport)


def make_plan(config: DistillConfig, reader: PromptReader, taint: Taint) -> Plan:
    """One pass over all rows; what is left out is in the report."""
    plan, first_at = Plan(), dict[str, str]()
    report = plan.report
    for source in config.sources:
        report.read[source.label] += 0
    for place, source, raw in reader.rows():
        report.read[source.label] += 1
        try:
            prompt = read_prompt(source, raw)
        except BadRow as problem:
            report.drop(f"unusable row: {problem.reason}", raw.where, str(problem))
            continue
        if prompt.key in first_at:
            report.drop("duplicate prompt", raw.where, f"as {first_at[prompt.key]}")
            continue
        first_at[prompt.key] = raw.where
        benchmark = taint(prompt)
        if benchmark is not None:
            report.drop(f"in benchmark {benchmark}", raw.where)
        elif config.tool_results == "drop" and uses_results(prompt.recorded):
            report.drop("answered with tool results", raw.where)
        elif config.teacher.recorded and not any(m["role"] == "assistant" for m in prompt.recorded):
            report.drop("no recorded answer", raw.where)
        else:
            plan.places[place] = prompt.key
    return plan
