"""What decoding costs in time, and what accuracy it buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tah2.study import numbers, published
from tah2.study.report.blocks import Block, Cell, Figure, Missing, Row, Section, Table
from tah2.study.report.draw.lines import Panel, Series, panels
from tah2.study.report.view import NOTHING, View, listed, times

Rows = Sequence[Mapping[str, Any]]
METRICS = (
    ("flops_per_token", "FLOPs/token"),
    ("latency_seconds", "Latency"),
    ("tokens_per_second", "Tokens/s"),
)


def runtime(view: View) -> Section:
    title = "Runtime efficiency"
    rows = [row for row in view.results.runtime if row["variant"] in view.results.variants]
    if not rows:
        planned = bool((view.results.study.get("runtime") or {}).get("variants"))
        return Section(
            "runtime", title, (Missing("Latency and throughput have not been measured."),), absent=not planned
        )
    batches = sorted({int(row["batch"]) for row in rows})
    blocks: list[Block] = [_runtime_table(view, rows, batches), _paper_table()]
    figure = _latency_figure(view, rows, batches[0])
    if figure is not None:
        blocks.append(figure)
    return Section("runtime", title, tuple(blocks))


def _value(rows: Rows, variant: str, batch: int, metric: str) -> float | None:
    found = [row for row in rows if row["variant"] == variant and int(row["batch"]) == batch]
    value = found[0].get(metric) if found else None
    return None if value is None else float(value)


def _runtime_table(view: View, rows: Rows, batches: Sequence[int]) -> Table:
    variants = list(dict.fromkeys(str(row["variant"]) for row in rows))
    columns = ["Variant"] + [f"{name}, batch {batch}" for batch in batches for _, name in METRICS]
    body = []
    for variant in variants:
        cells = [
            _measured(_value(rows, variant, batch, metric), _value(rows, view.baseline or "", batch, metric), metric)
            for batch in batches
            for metric, _ in METRICS
        ]
        body.append(Row(Cell(view.title(variant)), tuple(cells), marked=view.info(variant).loop == "tah2"))
    notes = (
        "Measured side by side on one machine; in small print the ratio to the baseline at that batch size. Latency "
        "is the mean time of one response in seconds, from submission to its last token."
    )
    return Table("table-runtime", "Runtime of decoding.", tuple(columns), tuple(body), notes)


def _measured(value: float | None, reference: float | None, metric: str) -> Cell:
    if value is None:
        return Cell(NOTHING)
    words = f"{value / 1e6:.3g}M" if metric == "flops_per_token" else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return Cell(words, times(value / reference) if reference else "")


def _paper_table() -> Table:
    columns = ["Model"] + [f"{name}, batch {batch}" for batch in published.RUNTIME for _, name in METRICS]
    names = {"standard": "Standard", "tah2-fixed": "TaH2-fixed M=2", "tah2": "TaH2 M=2"}
    rows = []
    for key in published.RUNTIME[1]:
        cells = []
        for found in published.RUNTIME.values():
            base = found["standard", 1]
            for value, reference, unit in (
                (found[key].gflops_per_token, base.gflops_per_token, "G"),
                (found[key].latency_seconds, base.latency_seconds, ""),
                (found[key].tokens_per_second, base.tokens_per_second, ""),
            ):
                cells.append(Cell(f"{value:.2f}{unit}" if unit else f"{value:.1f}", times(value / reference)))
        rows.append(Row(Cell(names[key[0]]), tuple(cells)))
    caption = "The paper's runtime table: 1.7B on AIME26, one A800, an extended Mini-SGLang."
    return Table("table-runtime-paper", caption, tuple(columns), tuple(rows))


def _latency_figure(view: View, rows: Rows, batch: int) -> Figure | None:
    """Accuracy at every cutoff against the time that a response cut off there takes."""
    series = []
    for variant in dict.fromkeys(str(row["variant"]) for row in rows):
        runs, latency = view.runs(variant), _value(rows, variant, batch, "latency_seconds")
        if runs is None or latency is None:
            continue
        share = runs.mean_compute() / runs.mean_compute()[-1]
        low, high = 100 * _band(runs)
        series.append(
            Series(
                view.title(variant), view.look(variant), 1000 * latency * share, 100 * runs.mean_accuracy(), low, high
            )
        )
    if not series:
        return None
    panel = Panel("", series, "mean latency of a response (milliseconds)", "accuracy (%)", log2=True, below=0)
    best = max(series, key=lambda one: float(np.max(one.y)))
    words = (
        f"Accuracy of responses cut off at each number of tokens against their mean latency at batch size {batch}. The "
        "latency of a cut response is the measured latency of whole ones, in proportion to the FLOPs up to the cut. "
        f"{best.label} reaches the highest accuracy."
    )
    paper = "TaH2 at M = 2 takes 30 to 34% longer per response than Standard and is more accurate at the same latency."
    alt = f"Accuracy against latency for {listed([one.label for one in series])}."
    return Figure("figure-latency", "Accuracy against latency", words, alt, panels([panel], 1, 6.4, 4.0), paper)


def _band(runs: numbers.Runs) -> Any:
    """The 95% interval at every cutoff `[2, C]`."""
    return np.percentile(runs.draws[0], [2.5, 97.5], axis=0)
