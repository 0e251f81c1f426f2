"""Curves of one or several runs as a picture, for people who would rather look."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.train.callbacks.jsonl import FILE_NAME, read_records

SMOOTH_ABOVE = 100
"""Curves with more points than this are drawn as a running mean over their raw values."""


@dataclass(frozen=True)
class Curve:
    steps: list[int]
    values: list[float]
    """NaN where a value was not finite."""


@dataclass(frozen=True)
class RunCurves:
    name: str
    train: dict[str, Curve]
    validation: dict[str, Curve]

    @property
    def max_depth(self) -> int:
        m = 1
        while f"depth/{m + 1}/share" in self.train:
            m += 1
        return m


def read_curves(path: str | Path) -> RunCurves:
    """The curves in a run's log; `path` is the log or the folder that holds it."""
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"There is no training log at {path}.")
    points: dict[str, dict[str, dict[int, float]]] = {"step": {}, "validation": {}}
    name = path.parent.name
    for record in read_records(path):
        kind, step = record.get("kind", ""), record.get("step")
        if kind == "start":
            name = record.get("name") or name
        if kind not in points or not isinstance(step, int):
            continue
        for key, value in record.items():
            if key not in ("kind", "step", "time") and (value is None or isinstance(value, (int, float))):
                points[kind].setdefault(key, {})[step] = math.nan if value is None else float(value)
    if not points["step"]:
        raise ConfigError(f"{path} holds no training step yet.")
    train, validation = (
        {key: Curve(sorted(at), [at[step] for step in sorted(at)]) for key, at in points[kind].items()}
        for kind in ("step", "validation")
    )
    return RunCurves(name, train, validation)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values up to each point; gaps (NaN) are left out."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def plot_curves(logs: Iterable[str | Path], out: str | Path) -> Path:
    """Draw the logs (files or run folders) into one picture; the suffix of `out` says whether PNG, SVG or PDF."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("Drawing curves needs matplotlib: pip install 'tah2[plots]'.") from None
    runs = _distinct([read_curves(log) for log in logs])
    if not runs:
        raise ConfigError("Name at least one training log to draw.")
    panels = [panel for panel in PANELS if any(_drawn(run, panel) for run in runs)]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        _draw(axis, panel, runs)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if len(runs) > 1:
        handles = [axes[0].plot([], [], color=f"C{i}", label=run.name)[0] for i, run in enumerate(runs)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(runs), 5), frameon=False)
    else:
        figure.suptitle(runs[0].name)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    return out


@dataclass(frozen=True)
class Line:
    label: str
    """What distinguishes it within its panel; empty for the only one."""
    metric: str
    validation: bool = False
    beside: int = 0
    """How many lines before it in its panel it belongs to: drawn dashed in their colour where colours are free."""


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Callable[[int], list[Line]]
    """The lines of a run with so many depths."""


def _depths(metric: str, first: int = 1, beyond: int = 0) -> Callable[[int], list[Line]]:
    """One line per depth from `first` up to M less `beyond`."""
    return lambda depths: [Line(f"depth {m}", metric.format(m)) for m in range(first, depths + 1 - beyond)]


def _rates(depths: int) -> list[Line]:
    """Decisions beside labels."""
    return [
        line
        for m in range(1, depths)
        for line in (
            Line(f"continued {m}", f"decider/{m}/continue_rate"),
            Line(f"labelled {m}", f"decider/{m}/label_rate", beside=1),
        )
    ]


PANELS = (
    Panel(
        "prediction loss",
        lambda _: [Line("train", "loss/prediction"), Line("validation", "loss/prediction", validation=True)],
    ),
    Panel(
        "loss per depth, wherever measured",
        lambda depths: (
            [
                Line("depth 1", "depth/1/loss"),
                *(Line(f"depth {m}", f"depth/{m}/loss_measured") for m in range(2, depths + 1)),
            ]
            if depths > 1
            else []
        ),
    ),
    Panel("mean depth", lambda depths: [Line("", "depth/mean")] if depths > 1 else []),
    Panel("share of tokens that continue", _rates),
    Panel("agreement of decisions with labels", _depths("decider/{}/agreement", beyond=1)),
    Panel("gain of a further pass (nats)", _depths("decider/{}/gain", beyond=1)),
    Panel("balance weight of continue labels", _depths("decider/{}/beta", beyond=1)),
    Panel("gradient norm", lambda _: [Line("", "optim/grad_norm")]),
    Panel("tokens per second", lambda _: [Line("", "speed/tokens_per_second")]),
)


def _drawn(run: RunCurves, panel: Panel) -> list[tuple[Line, Curve]]:
    """The lines of the panel that the run has values for."""
    found = []
    for line in panel.lines(run.max_depth):
        curve = (run.validation if line.validation else run.train).get(line.metric)
        if curve is not None:
            found.append((line, curve))
    return found


def _draw(axis: Any, panel: Panel, runs: Sequence[RunCurves]) -> None:
    """Runs differ in colour and their lines in style; a run alone may spend its colours on its lines."""
    styles = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
    labelled = set()
    for i, run in enumerate(runs):
        for j, (line, curve) in enumerate(_drawn(run, panel)):
            colour = f"C{i if len(runs) > 1 else j - line.beside}"
            style = styles[j % len(styles) if len(runs) > 1 else line.beside]
            marker = "o" if line.validation else None
            window = 1 if line.validation or len(curve.steps) <= SMOOTH_ABOVE else len(curve.steps) // 50 + 1
            if window > 1:
                axis.plot(curve.steps, curve.values, color=colour, alpha=0.2, linewidth=0.6)
            label = line.label if line.label and line.label not in labelled else None
            labelled.add(line.label)
            smooth = running_mean(curve.values, window)
            axis.plot(curve.steps, smooth, color=colour, linestyle=style, marker=marker, markersize=3, label=label)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    if labelled - {""}:
        _legend(axis, grey=len(runs) > 1)


def _legend(axis: Any, grey: bool) -> None:
    """Within a panel the legend explains the lines; colours of several runs are explained once, below."""
    legend = axis.legend(fontsize=7, framealpha=0.8, edgecolor="none")
    if grey:
        for handle in legend.legend_handles:
            handle.set_color("0.3")


def _distinct(runs: Sequence[RunCurves]) -> list[RunCurves]:
    """Runs of equal name get a number."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else RunCurves(f"{run.name} ({i})", run.train, run.validation)
        for i, run in enumerate(runs, start=1)
    ]
