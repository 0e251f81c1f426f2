"""A plan and its results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from tah2.compute.published import TRAIN
from tah2.study.estimate import estimate, unit_flops
from tah2.study.plan import Plan, Task, Unit
from tah2.study.runner import state_of
from tah2.study.shop import Shop
from tah2.train.callbacks.progress import duration


def plan_rows(shop: Shop, stages: Iterable[str]) -> list[dict[str, Any]]:
    """One row per variant (and per base): its units, what is to do, and what that costs."""
    plan, wanted = shop.plan, frozenset(stages)
    costs = estimate(plan)
    rows: dict[str, dict[str, Any]] = {}
    for task in plan.tasks.values():
        if task.stage not in wanted:
            continue
        name, unit = _row_of(plan, task)
        row = rows.setdefault(
            name, {"name": name, "loop": "", "units": set(), "stages": 0, "done": 0, "flops": 0.0, "seconds": 0.0}
        )
        if unit is not None:
            row["loop"] = f"{unit.loop.kind} M={unit.ceiling}"
            row["units"].add(unit.id)
        done = state_of(shop, task) == "done"
        row["stages"] += 1
        row["done"] += done
        if not done:
            row["flops"] += costs[task.id].flops
            row["seconds"] += costs[task.id].seconds
    return [{**row, "units": len(row["units"])} for row in rows.values()]


def _row_of(plan: Plan, task: Task) -> tuple[str, Unit | None]:
    if task.subject in plan.bases:
        return f"base {plan.bases[task.subject].name}", None
    if task.subject in plan.units:
        unit = plan.units[task.subject]
        return (f"search of {unit.variant}" if unit.group == "search" else unit.variant), unit
    return task.stage, None


def plan_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Plan", title_justify="left", box=None, pad_edge=False)
    for name, justify in PLAN_COLUMNS.items():
        table.add_column(name, justify=justify)
    for row in rows:
        table.add_row(
            row["name"],
            row["loop"],
            str(row["units"] or ""),
            f"{row['done']}/{row['stages']}",
            flops_text(row["flops"]),
            duration(row["seconds"]),
        )
    total = {key: sum(row[key] for row in rows) for key in ("units", "done", "stages", "flops", "seconds")}
    table.add_row(
        "all",
        "",
        str(total["units"]),
        f"{total['done']}/{total['stages']}",
        flops_text(total["flops"]),
        duration(total["seconds"]),
        style="bold",
    )
    return table


PLAN_COLUMNS: dict[str, Any] = {
    "variant": "left",
    "loop": "left",
    "models": "right",
    "stages done": "right",
    "FLOPs to do": "right",
    "time": "right",
}


def flops_text(flops: float) -> str:
    """`3.4e12`, or `-` where nothing is counted."""
    return f"{flops:.2e}".replace("e+", "e") if flops else "-"


def training_rows(plan: Plan) -> list[dict[str, Any]]:
    """Expected training FLOPs of one model of each variant, with the paper's where it publishes them."""
    published = {(kind, depth): (fwd_bwd, label) for kind, depth, _, fwd_bwd, label in (*TRAIN, *PUBLISHED_DEEPER)}
    rows, first = [], {unit.variant: unit for unit in reversed(plan.units.values()) if unit.of is None}
    standard = None
    for name in dict.fromkeys(unit.variant for unit in plan.units.values() if unit.of is None):
        unit = first[name]
        found = unit_flops(plan.study, unit)
        if found is None:
            continue
        if name == plan.study.baseline:
            standard = found.total_paper
        paper = published.get((unit.loop.kind, unit.ceiling)) if plan.study.estimate.published else None
        rows.append(
            {
                "name": name,
                "forward_backward": found.forward_backward,
                "label_paper": found.label_paper,
                "label_actual": found.label_actual,
                "total_paper": found.total_paper,
                "vs_baseline": None if standard is None else found.total_paper / standard,
                "paper_total": None if paper is None else sum(paper) * 1e18,
            }
        )
    return rows


PUBLISHED_DEEPER = (("tah2", 4, (), 87.6, 26.7), ("tah2", 8, (), 164.2, 52.0))
"""Rows of the paper's table whose share of continuing tokens is not published."""


def training_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Training FLOPs of one model", title_justify="left", box=None, pad_edge=False)
    table.add_column("variant")
    with_paper = any(row["paper_total"] is not None for row in rows)
    names = ["fwd + bwd", "labels (paper's way)", "labels (ours)", "total", "vs. baseline"]
    for name in [*names, *(["paper's total"] if with_paper else [])]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [flops_text(row[key]) for key in ("forward_backward", "label_paper", "label_actual", "total_paper")]
        times = "" if row["vs_baseline"] is None else f"{row['vs_baseline']:.2f}x"
        paper = [] if not with_paper else ["" if row["paper_total"] is None else flops_text(row["paper_total"])]
        table.add_row(row["name"], *cells, times, *paper)
    return table


def commands(shop: Shop) -> list[str]:
    """What a study that runs elsewhere will call, one line per training and evaluation."""
    import shlex

    from tah2.study.stages.benchmarks import evaluate_command

    plan, lines = shop.plan, []
    for task in plan.tasks.values():
        if task.stage == "train" and plan.study.launch.command:
            recipe = shop.root / plan.units[task.subject].folder / "train.yaml"
            lines.append(shlex.join([*plan.study.launch.command, "sft", str(recipe)]))
        if task.stage == "generate" and plan.study.evaluate.tasks:
            lines.append(shlex.join(evaluate_command(shop, plan.units[task.subject])))
    return lines


def result_table(summary: dict[str, Any]) -> Table:
    """The small table at the end of a run."""
    base = next((row for row in summary["variants"] if row["name"] == summary["baseline"]), None)
    gains = {row["name"]: row for row in summary["matched_compute"] if row["against"] == summary["baseline"]}
    table = Table(title=summary["title"], title_justify="left", box=None, pad_edge=False)
    table.add_column("variant")
    names = ("runs", "validation loss", "accuracy", "FLOPs/token", "depth", "at matched compute")
    for name in names:
        table.add_column(name, justify="right")
    for row in summary["variants"]:
        table.add_row(
            row["title"],
            str(len(row["seeds"])),
            _number(row["validation_loss"], "{:.4f}"),
            _percent(row["accuracy"], row["accuracy_interval"]),
            _times(row["flops_per_token"], None if base is None else base["flops_per_token"]),
            _number(row["mean_depth"] if row["mean_depth"] is not None else row["validation_depth"], "{:.2f}"),
            _matched(row, gains.get(row["name"]), base),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _percent(value: float | None, ends: list[float] | None) -> str:
    if value is None:
        return ""
    around = "" if not ends or None in ends else f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"
    return f"{100 * value:.1f}%{around}"


def _times(value: float | None, base: float | None) -> str:
    return "" if not value or not base else f"{value / base:.2f}x"


def _matched(row: dict[str, Any], gain: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
    if gain is None:
        return _percent(row["accuracy"], None) if row is base else ""
    ends = gain["interval"]
    around = "" if None in ends else f" [{100 * ends[0]:+.1f}, {100 * ends[1]:+.1f}]"
    return f"{100 * gain['accuracy']:.1f}% ({100 * gain['gain']:+.1f}{around})"
