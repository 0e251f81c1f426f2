"""What holds, every run, and how it all was made."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
from html import escape
from pathlib import Path

from tah2.config.strict import ConfigError
from tah2.evals.manifest import commit, versions
from tah2.study.claims import ALIKE
from tah2.study.layout import UnitResult
from tah2.study.numbers import runs_of_units
from tah2.study.report.blocks import Block, Cell, Missing, Paragraph, Raw, Row, Section, Table
from tah2.study.report.view import NOTHING, View, listed, percent


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
    words += (
        "A claim holds when the whole 95% interval, or every model or pair of seeds, lies on its side; that two are "
        f"alike, when the whole interval is within {100 * ALIKE:.0f} points of zero."
    )
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
    return Section("runs", "Every run", (*_search_blocks(view), Raw(inside, table)))


def _run_row(view: View, unit: UnitResult) -> Row:
    info = unit.info
    ceiling = str(info.ceiling) if info.ceiling != info.max_depth else NOTHING
    accuracy, depth, loss, seconds = NOTHING, NOTHING, NOTHING, NOTHING
    try:
        validation = unit.validation
        loss = "diverged" if validation["loss"] is None else f"{validation['loss']:.4f}"
        depth = f"{validation['depth/mean']:.2f}"
    except (ConfigError, KeyError):
        pass
    with contextlib.suppress(ConfigError, KeyError):
        seconds = NOTHING if info.of else f"{unit.training['seconds']:,.0f}"
    with contextlib.suppress(ConfigError):
        accuracy = percent(float(runs_of_units([unit], view.results.cutoffs).mean_accuracy()[-1]))
    facts = (info.group, info.loop, str(info.max_depth), ceiling, str(info.base_seed), str(info.seed))
    words = (*facts, f"{info.learning_rate:g}", loss, accuracy, depth, seconds)
    return Row(Cell(info.id), tuple(Cell(word) for word in words))


def _search_blocks(view: View) -> tuple[Block, ...]:
    """Which learning rate each search chose, and whether the grid ends there."""
    searched: dict[str, dict[float, float]] = {}
    for unit in view.results.all_units:
        if unit.info.group == "search":
            searched.setdefault(unit.info.variant, {})[unit.info.learning_rate] = _searched_loss(unit)
    if not searched:
        return (Paragraph("There was no search: every run is in the tables above and in this list."),)
    rates = sorted({rate for losses in searched.values() for rate in losses})
    rows, at_edge = [], []
    for variant, losses in searched.items():
        if all(math.isinf(loss) for loss in losses.values()):
            continue
        chosen = min(losses, key=lambda rate: (losses[rate], rate))
        edge = "smallest" if chosen == rates[0] else "largest" if chosen == rates[-1] else ""
        cells = [Cell(_loss_text(losses.get(rate)), strong=rate == chosen) for rate in rates]
        cells += [Cell(f"{chosen:g}"), Cell(f"the {edge} of the grid" if edge else "inside the grid")]
        rows.append(Row(Cell(_searched_title(view, variant)), (*cells, Cell(_takers(view, variant)))))
        at_edge += [f"{_searched_title(view, variant)} (the {edge})"] if edge else []
    words = (
        f"{sum(map(len, searched.values()))} of these runs are the learning-rate search: {len(searched)} variants, the "
        f"same rates for each ({', '.join(f'{rate:g}' for rate in rates)}), the lowest validation loss on one base "
        "seed wins. "
    )
    words += (
        f"Chosen at an edge of the grid, so that a rate beyond it might do better still: {listed(at_edge)}."
        if at_edge
        else "No search ended at an edge of the grid."
    )
    columns = ("Variant", *(f"loss at {rate:g}" for rate in rates), "Chosen", "Where", "Taken by")
    table = Table("table-search", "The learning-rate search: validation losses.", columns, tuple(rows))
    return Paragraph(words), table


def _searched_loss(unit: UnitResult) -> float:
    """Infinite where the run has no loss: it diverged, or has not ended yet."""
    try:
        loss = unit.validation["loss"]
    except ConfigError:
        return math.inf
    return math.inf if loss is None else float(loss)


def _loss_text(loss: float | None) -> str:
    return NOTHING if loss is None or math.isinf(loss) else f"{loss:.4f}"


def _searched_title(view: View, variant: str) -> str:
    return view.title(variant) if variant in view.results.variants else variant


def _takers(view: View, variant: str) -> str:
    """The variants that take this one's rate."""
    asked = view.results.study.get("variants") or {}
    names = [name for name, other in asked.items() if (other or {}).get("rate_of") == variant]
    return ", ".join(names) or NOTHING


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
