"""Figures of a comparison: accuracy against FLOPs, latency and votes, and one panel per benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tah2.config.strict import ConfigError
from tah2.evals.scaling import RunCurves
from tah2.evals.scaling_report import ALL, ReportConfig, Row, point_rows, slope_rows, vote_rows

FORMATS = ("svg", "pdf", "png")
COLORS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999933")
"""A palette that colour-blind readers can tell apart (Okabe and Ito's), the baseline in grey."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BEYOND = 0.35
"""Opacity of points beyond `fit_to`."""


def draw_figures(runs: Sequence[RunCurves], config: ReportConfig, out: Path) -> list[Path]:
    """Every figure that the runs have the data for, in every format."""
    plt = _pyplot()
    rows = point_rows(runs, config)
    made: list[Path] = []
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("accuracy-flops", lambda: _curves(plt, runs, rows, config, "flops")),
        ("accuracy-latency", lambda: _curves(plt, runs, rows, config, "seconds")),
        ("accuracy-flops-by-task", lambda: _panels(plt, runs, rows, config)),
        ("votes", lambda: _votes(plt, runs, config)),
    ]
    for name, make in makers:
        figure = make()
        if figure is None:
            continue
        for form in FORMATS:
            made.append(out / f"{name}.{form}")
            figure.savefig(made[-1], dpi=200, bbox_inches="tight", metadata=_undated(form))
        plt.close(figure)
    return made


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("Figures need the library 'matplotlib': install tah2 with its extra 'plots'.") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "tah2", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def _undated(form: str) -> dict[str, None]:
    """The same data draw the same bytes."""
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})


def _curves(plt: Any, runs: Sequence[RunCurves], rows: Sequence[Row], config: ReportConfig, cost: str) -> Any:
    chosen = [row for row in rows if row["task"] == ALL and row[cost]]
    if not chosen:
        return None
    figure, axes = plt.subplots(figsize=(4.6, 3.4))
    _draw(axes, runs, chosen, config, cost)
    if cost == "flops":
        _lines(axes, runs, chosen, config)
    axes.legend(frameon=False)
    return figure


def _panels(plt: Any, runs: Sequence[RunCurves], rows: Sequence[Row], config: ReportConfig) -> Any:
    tasks = [(curve.task, curve.title) for curve in runs[0].tasks]
    if len(tasks) < 2 or not all(row["flops"] for row in rows if row["task"] != ALL):
        return None
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(3.2 * columns, 2.6 * lines), squeeze=False)
    for axes, (task, title) in zip(grid.flat, tasks, strict=False):
        _draw(axes, runs, [row for row in rows if row["task"] == task], config, "flops")
        axes.set_title(title, fontsize=9)
    for axes in grid.flat[len(tasks) :]:
        axes.set_visible(False)
    grid.flat[0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return figure


def _draw(axes: Any, runs: Sequence[RunCurves], rows: Sequence[Row], config: ReportConfig, cost: str) -> None:
    """One line per run with its intervals, light where it lies beyond `fit_to`."""
    for place, run in enumerate(runs):
        points = [row for row in rows if row["run"] == run.label and row[cost]]
        look = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 4}
        inside = [row for row in points if config.fit_to is None or row["cutoff"] <= config.fit_to]
        beyond = [*inside[-1:], *(row for row in points if row not in inside)]
        for part, opacity, label in ((beyond, BEYOND, None), (inside, 1.0, run.label)):
            if part:
                x, y = np.array([[row[cost], row["accuracy"] * 100] for row in part]).T
                axes.plot(x, y, alpha=opacity, label=label, linewidth=1.2, **look)
        if points:
            x, low, high = np.array(
                [[row[cost], row["accuracy_low"] * 100, row["accuracy_high"] * 100] for row in points]
            ).T
            axes.fill_between(x, low, high, color=look["color"], alpha=0.10, linewidth=0)
    axes.set_xscale("log", base=2 if cost == "flops" else 10)
    names = {"flops": "decoding FLOPs per response", "seconds": "mean latency per response (s)"}
    axes.set_xlabel(names[cost])
    axes.set_ylabel("accuracy (%)")
    if cost == "flops":
        axes.xaxis.set_major_formatter(lambda value, _: engineering(value))


def _lines(axes: Any, runs: Sequence[RunCurves], rows: Sequence[Row], config: ReportConfig) -> None:
    fitted = {row["run"]: row for row in slope_rows(runs, config)}
    for place, run in enumerate(runs):
        points = [
            row["flops"]
            for row in rows
            if row["run"] == run.label and (config.fit_to is None or row["cutoff"] <= config.fit_to)
        ]
        if run.label in fitted and points:
            line = fitted[run.label]
            ends = np.array([min(points), max(points)])
            axes.plot(
                ends,
                line["intercept"] + line["points_per_doubling"] * np.log2(ends),
                linestyle=":",
                linewidth=1,
                color=COLORS[place % len(COLORS)],
            )


def _votes(plt: Any, runs: Sequence[RunCurves], config: ReportConfig) -> Any:
    rows = vote_rows(runs, config)
    if not rows or max(row["n"] for row in rows) < 2:
        return None
    figure, axes = plt.subplots(figsize=(4.6, 3.4))
    costed = all(row["flops"] for row in rows)
    for place, run in enumerate(runs):
        points = [row for row in rows if row["run"] == run.label]
        if points:
            x = [row["flops"] if costed else row["n"] for row in points]
            color = COLORS[place % len(COLORS)]
            axes.plot(x, [row["accuracy"] * 100 for row in points], color=color, label=run.label, marker=".")
            low, high = ([row[f"accuracy_{end}"] * 100 for row in points] for end in ("low", "high"))
            axes.fill_between(x, low, high, color=color, alpha=0.10, linewidth=0)
    axes.set_xscale("log", base=2)
    if costed:
        axes.xaxis.set_major_formatter(lambda value, _: engineering(value))
    axes.set_xlabel("decoding FLOPs per problem" if costed else "votes n")
    axes.set_ylabel("cons@n (%)")
    axes.legend(frameon=False)
    return figure


def engineering(value: float) -> str:
    """`12T`, `950G`, `1.5P`: FLOPs in few characters."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
