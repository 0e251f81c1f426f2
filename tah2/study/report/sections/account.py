"""What holds, every run, and how it all was made."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from html import escape
from pathlib import Path

from tah2.config.strict import ConfigError
from tah2.evals.manifest import commit, versions
from tah2.study.layout import UnitResult
from tah2.study.numbers import runs_of_units
from tah2.study.report.blocks import Block, Cell, Missing, Paragraph, Raw, Row, Section, Table
from tah2.study.report.view import NOTHING, View, percent


def claims(view: View) -> Section:
    title = "What holds"
    try:
        found = view.results.summary.get("claims") or []
    except ConfigError:
        found = []
    if not found:
        return Section("claims", title, (Missing("The study has not drawn its summary yet, so no claim is judged."),))
    held = sum(bool(claim["holds"]) for claim in found)
    words = f"Of {len(found)} claims that this study can judge, {held} hold here and {len(found) - held} do not. "
    words += "A claim holds when the whole 95% interval, or every pair of seeds, lies on its side."
    rows = tuple(
        Row(
            Cell(str(claim["claim"])),
            (Cell(str(claim["paper"])), Cell(str(claim["ours"])), Cell("✓ holds" if claim["holds"] else "✗ does not")),
            marked=not claim["holds"],
        )
        for claim in found
    )
    columns = ("Claim", "In the paper", "Here", "Verdict")
    table = Table("table-claims", "The paper's claims beside this study.", columns, rows, worded=True)
    return Section("claims", title, (Paragraph(words), table))


def all_runs(view: View) -> Section:
    units = view.results.all_units
    if not units:
        return Section("runs", "Every run", (Missing("Nothing has been trained yet."),))
    rows = tuple(_run_row(view, unit) for unit in units)
    columns = (
        "Run", "Group", "Loop", "M", "Ceiling", "Base seed", "Seed", "Learning rate", "Validation loss", "Accuracy (%)",
        "Mean depth", "Seconds",
    )  # fmt: skip
    caption = f"All {len(units)} runs of the study, those of the learning-rate search too; none is left out."
    table = Table("table-runs", caption, columns, rows)
    inside = f"<details><summary>All {len(units)} runs</summary>{table.html()}</details>"
    return Section("runs", "Every run", (Paragraph(_search_words(view)), Raw(inside, table)))


def _run_row(view: View, unit: UnitResult) -> Row:
    info = unit.info
    ceiling = str(info.ceiling) if info.ceiling != info.max_depth else NOTHING
    accuracy, depth, loss, seconds = NOTHING, NOTHING, NOTHING, NOTHING
    try:
        validation = unit.validation
        loss, depth = f"{validation['loss']:.4f}", f"{validation['depth/mean']:.2f}"
    except (ConfigError, KeyError):
        pass
    with contextlib.suppress(ConfigError, KeyError):
        seconds = NOTHING if info.of else f"{unit.training['seconds']:,.0f}"
    with contextlib.suppress(ConfigError):
        accuracy = percent(float(runs_of_units([unit], view.results.cutoffs).mean_accuracy()[-1]))
    facts = (info.group, info.loop, str(info.max_depth), ceiling, str(info.base_seed), str(info.seed))
    words = (*facts, f"{info.learning_rate:g}", loss, accuracy, depth, seconds)
    return Row(Cell(info.id), tuple(Cell(word) for word in words))


def _search_words(view: View) -> str:
    searched = [unit.info for unit in view.results.all_units if unit.info.group == "search"]
    if not searched:
        return "There was no search: every run is in the tables above and in this list."
    rates = sorted({info.learning_rate for info in searched})
    variants = len({info.variant for info in searched})
    listed = ", ".join(f"{rate:g}" for rate in rates)
    return (
        f"{len(searched)} of these runs are the learning-rate search: {variants} variants, the same rates for each "
        f"({listed}), the lowest validation loss on one base seed wins."
    )


def how_made(view: View) -> Section:
    study = view.results.study
    facts = {**_machine(), **{name: str(value) for name, value in view.made_by.items()}, **_seeds(view)}
    blocks: list[Block] = []
    rows = tuple(Row(Cell(name.replace("_", " ")), (Cell(value),)) for name, value in facts.items())
    blocks.append(Table("table-made", "Command, seeds and machine.", ("", "Value"), rows, worded=True))
    text = escape(json.dumps(study, indent=1))
    blocks.append(Raw(f"<details><summary>The resolved study file</summary><pre>{text}</pre></details>"))
    return Section("made", "How it was made", tuple(blocks))


def _machine() -> dict[str, str]:
    """Where the report is written: code, versions and processor."""
    found = {"commit": commit() or NOTHING, "processor": _processor(), "cores": str(os.cpu_count() or NOTHING)}
    packages = {name: number for name, number in versions(("tah2", "torch", "transformers", "numpy")).items() if number}
    return {**found, "python": platform.python_version(), **packages}


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _seeds(view: View) -> dict[str, str]:
    units = view.results.units
    bases = sorted({unit.info.base_seed for unit in units})
    seeds = sorted({unit.info.seed for unit in units})
    generate = view.results.study.get("generate") or {}
    facts = {
        "base seeds": ", ".join(map(str, bases)) or NOTHING,
        "post-training seeds": ", ".join(map(str, seeds)) or NOTHING,
        "trained models": str(sum(unit.info.of is None for unit in view.results.all_units)),
    }
    if generate.get("problems"):
        facts["problems"] = f"{generate['problems']}, {generate.get('samples', 1)} responses each"
    return facts
