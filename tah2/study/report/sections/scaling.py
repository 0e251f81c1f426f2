"""Test-time scaling and depth scaling: the teaser, the main table, and their figures at full size."""

from __future__ import annotations

import numpy as np

from tah2.study import numbers, published
from tah2.study.numbers import Runs
from tah2.study.report.blocks import Block, Cell, Figure, Missing, Row, Section, Table
from tah2.study.report.draw.lines import Panel, Series, panels
from tah2.study.report.view import NOTHING, View, accuracy_cell, between, listed, percent, short, signed, times


def teaser(view: View) -> Section:
    shown = [variant for variant in view.shown if view.runs(variant) is not None]
    if view.baseline not in shown:
        return Section("teaser", "Scaling at a glance", (no_responses(),))
    return Section("teaser", "Scaling at a glance", (_teaser_figure(view, shown), _slope_table(view, shown)))


def no_responses() -> Missing:
    return Missing("This study has no graded responses, so there is no accuracy to show.")


def _teaser_figure(view: View, shown: list[str]) -> Figure:
    compute = Panel(
        "(a) Test-time scaling",
        [scaling_series(view, variant, fitted=True) for variant in shown],
        "decoding FLOPs per response (millions)",
        "accuracy (%)",
        log2=True,
        unit=1e6,
        below=0,
    )
    drawing = panels([compute, depth_panel(view, "(b) Depth scaling")], 2, 8.6, 3.9)
    cutoffs = view.results.cutoffs
    base = _runs(view, str(view.baseline))
    others = [variant for variant in shown if variant != view.baseline]
    steeper = [
        view.title(variant) for variant in others if numbers.slope_difference(_runs(view, variant), base).low > 0
    ]
    words = (
        f"(a) Accuracy when responses are cut off at {cutoffs[0]} to {cutoffs[-1]} tokens, against their cost; lines "
        f"are least-squares fits on log2 of the FLOPs{_fitted_over(view)}. {_steeper(view, steeper)} (b) Accuracy of "
        "whole responses as the depth ceiling M grows; bars are 95% intervals."
    )
    paper = (
        "Slopes on AIME24–26, in points per doubling: Standard 1.79, Ouro 2.12 (adaptive 2.27), Huginn 2.26, "
        "TaH2 at M = 2 2.74. The gain of TaH2 over Standard grows from +2.8 points at M = 2 to +3.9 at M = 8."
    )
    alt = (
        f"Two panels. Accuracy against decoding FLOPs for {listed([view.title(name) for name in shown])}, with fitted "
    )
    alt += "lines; and accuracy against the depth ceiling for each kind of loop."
    return Figure("figure-teaser", "Test-time and depth scaling", words, alt, drawing, paper)


def _fitted_over(view: View) -> str:
    fitted, cutoffs = view.results.fitted, view.results.cutoffs
    return "" if fitted is None else f", over the cutoffs up to {cutoffs[fitted - 1]} tokens"


def _steeper(view: View, steeper: list[str]) -> str:
    name = view.title(view.baseline or "")
    if not steeper:
        return f"No variant measurably gains accuracy faster per doubling than {name}."
    verb = "gains" if len(steeper) == 1 else "gain"
    return f"{listed(steeper)} {verb} accuracy faster per doubling than {name}, all of the interval above it."


def scaling_series(view: View, variant: str, fitted: bool = False, task: str | None = None) -> Series:
    runs = _runs(view, variant, task)
    low, high = np.percentile(runs.draws[0], [2.5, 97.5], axis=0)
    fit = None
    if fitted:
        line = numbers.slope(runs).line
        fit = (100 * line.slope, 100 * line.intercept)
    return Series(
        view.title(variant),
        view.look(variant),
        runs.mean_compute(),
        100 * runs.mean_accuracy(),
        None if fitted else 100 * low,
        None if fitted else 100 * high,
        fit,
    )


def _runs(view: View, variant: str, task: str | None = None) -> Runs:
    runs = view.runs(variant, task)
    assert runs is not None
    return runs


def _slope_table(view: View, shown: list[str]) -> Table:
    rows = []
    for variant in shown:
        fitted, theirs = numbers.slope(_runs(view, variant)), published.SLOPES.get(view.key(variant))
        cells = (
            Cell(f"{100 * fitted.line.slope:.2f}", between(fitted.interval, digits=2)),
            Cell(f"{fitted.line.r_squared:.3f}"),
            Cell(NOTHING if theirs is None else f"{theirs:.2f}"),
        )
        rows.append(Row(Cell(view.title(variant)), cells, marked=view.key(variant)[0] == "tah2"))
    notes = (
        "Points of accuracy per doubling of decoding FLOPs. The paper's slopes are of AIME24–26 at 4K to 16K tokens: "
        "compare their order, not their size. Intervals are bootstraps over bases, their training seeds and problems."
    )
    columns = ("Variant", "Slope (95%)", "R²", "Slope in the paper")
    return Table("table-slopes", "Accuracy per doubling of compute.", columns, tuple(rows), notes)


def _matched_table(view: View, main: list[str]) -> Table:
    """Every variant against the baseline, and the study's subject against every other loop."""
    base, subject = str(view.baseline), view.subject
    pairs = [(variant, base) for variant in main if variant != base]
    if subject in main:
        pairs += [(subject, variant) for variant in main if variant not in (subject, base)]
    rows: list[Row] = []
    for variant, against in pairs:
        mine, theirs = _runs(view, variant), _runs(view, against)
        budget = numbers.matched_mean(mine, theirs)
        found = (budget, numbers.matched(mine, theirs), numbers.matched(mine, theirs, own=True))
        cells = (Cell(view.title(against)), Cell(short(budget.flops)), *(_matched_cell(one) for one in found))
        second = len(rows) == sum(other == base for _, other in pairs)
        rows.append(Row(Cell(view.title(variant)), cells, marked=variant == subject, rule=second))
    columns = (
        "Variant", "Against", "FLOPs per response", "Gain at that mean budget", "Gain, one cutoff for all",
        "Gain at its own full compute",
    )  # fmt: skip
    notes = (
        "Points of accuracy with 95% intervals. The FLOPs are those at which the other model is at its best. Mean "
        "budget: both spend that much on average as well as they can, each problem's cutoff being drawn from two. One "
        "cutoff: every response is cut at the same number of tokens, as in the paper's curves; a response that is cut "
        "before its answer earns nothing. Own full compute: the variant finishes its responses, and the other "
        "has nothing more to say."
    )
    return Table("table-matched", "Gains at matched decoding FLOPs.", columns, tuple(rows), notes)


def _matched_cell(found: numbers.Matched | None) -> Cell:
    return Cell(NOTHING) if found is None else Cell(signed(100 * found.gain.estimate), between(found.gain))


def depth_panel(view: View, title: str) -> Panel:
    """Accuracy of whole responses against M, one curve per kind of loop."""
    curves = []
    baseline = view.runs(view.baseline)
    for kind in ("huginn", "ouro", "tah2-fixed", "tah2"):
        found = [(depth, variant) for depth, variant in view.results.kind(kind).items() if view.runs(variant)]
        if not found:
            continue
        middle = [numbers.accuracy(_runs(view, variant)) for _, variant in found]
        curves.append(
            Series(
                _kind_title(view, found[0][1]),
                view.look(found[0][1]),
                [depth for depth, _ in found],
                [100 * value.estimate for value in middle],
                [100 * value.low for value in middle],
                [100 * value.high for value in middle],
            )
        )
    level = None
    if baseline is not None and view.baseline is not None:
        level = (100 * float(baseline.mean_accuracy()[-1]), view.look(view.baseline), view.title(view.baseline))
    ticks = sorted({int(x) for series in curves for x in np.asarray(series.x)})
    return Panel(title, curves, "depth ceiling M", "accuracy (%)", xticks=ticks, level=level, bars=True)


def _kind_title(view: View, variant: str) -> str:
    """`TaH2` for `TaH2 M=2`."""
    return view.title(variant).split(" M=")[0].split(" (")[0]


def main_table(view: View) -> Section:
    main = [variant for variant in view.group["main"] if view.runs(variant) is not None]
    if not main:
        return Section("main", "All variants", (no_responses(),))
    blocks: tuple[Block, ...] = (_main_table(view, main), _paper_table())
    return Section("main", "Accuracy of all variants", blocks)


def _main_table(view: View, main: list[str]) -> Table:
    tasks = [task for task in view.results.tasks if all(view.runs(variant, task) for variant in main)]
    name = view.title(view.baseline or "")
    columns = (
        "Variant",
        *map(family, tasks),
        "Average",
        f"over {name}",
        "FLOPs/token",
        "Mean depth",
        "Validation loss",
    )
    by_task = [[float(_runs(view, variant, task).mean_accuracy()[-1]) for task in tasks] for variant in main]
    best = np.max(by_task, axis=0)
    totals = [numbers.accuracy(_runs(view, variant)) for variant in main]
    most = max(total.estimate for total in totals)
    rows: list[Row] = []
    for variant, values, total in zip(main, by_task, totals, strict=True):
        cells = [Cell(percent(value), strong=value == high) for value, high in zip(values, best, strict=True)]
        cells += [accuracy_cell(total, strong=total.estimate == most), _gain_cell(view, variant)]
        cells += [Cell(times(view.flops_ratio(variant))), _number(numbers.mean_depth(view.units(variant)))]
        cells.append(_loss_cell(view, variant))
        loop = view.key(variant)[0]
        first = rows and loop != view.key(main[len(rows) - 1])[0]
        rows.append(Row(Cell(view.title(variant)), tuple(cells), marked=loop == "tah2", rule=bool(first)))
    counts = sorted({len(view.units(variant)) for variant in main})
    units = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    notes = (
        f"Accuracy in percent, with 95% intervals, over {units} trained models each; bold is the best of a column. "
        "FLOPs/token is all decoding FLOPs over all generated tokens, relative to the baseline. Mean depth is in "
        "iterations of the looped layers. Validation losses are means over seeds, with their range."
    )
    return Table("table-main", "Accuracy by family of problems.", columns, tuple(rows), notes)


def family(task: str) -> str:
    return task.replace("-", " ").replace("_", " ")


def _gain_cell(view: View, variant: str) -> Cell:
    baseline = view.runs(view.baseline)
    if baseline is None or variant == view.baseline:
        return Cell(NOTHING)
    found = numbers.gain(_runs(view, variant), baseline)
    return Cell(signed(100 * found.estimate), between(found))


def _number(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else f"{value:.2f}")


def _loss_cell(view: View, variant: str) -> Cell:
    found = numbers.validation_loss(view.units(variant))
    if found is None:
        return Cell(NOTHING)
    return Cell(f"{found.mean:.4f}", f"{found.low:.3f} to {found.high:.3f}" if len(found.values) > 1 else "")


def _paper_table() -> Table:
    names = {"standard": "Standard", "huginn": "Huginn", "ouro": "Ouro", "tah2-fixed": "TaH2-fixed", "tah2": "TaH2"}
    columns = ("Benchmark", *(f"{names[kind]} M={depth}" for kind, depth in published.MAIN))
    models = list(published.MAIN.values())
    rows = [
        Row(Cell(name), tuple(Cell(f"{model.accuracy[i]:.1f}") for model in models))
        for i, name in enumerate(published.BENCHMARKS)
    ]
    rows.append(Row(Cell("Average", strong=True), tuple(Cell(f"{model.average:.1f}") for model in models), rule=True))
    rows.append(Row(Cell("FLOPs/token"), tuple(Cell(times(model.flops_per_token)) for model in models)))
    return Table("table-main-paper", "The paper's main table: Qwen3-1.7B on ten benchmarks.", columns, tuple(rows))


def depth_and_compute(view: View) -> Section:
    blocks: list[Block] = []
    losses = _loss_panel(view)
    blocks.append(
        Missing("No validation loss has been measured yet.") if losses is None else _loss_figure(view, losses)
    )
    main = [variant for variant in view.group["main"] if view.runs(variant) is not None]
    if view.baseline in main:
        blocks += [_compute_figure(view, main), _matched_table(view, main)]
    else:
        blocks.append(no_responses())
    return Section("depth", "Depth and compute", tuple(blocks))


def _loss_panel(view: View) -> Panel | None:
    curves, level = [], None
    for kind in ("huginn", "ouro", "tah2-fixed", "tah2"):
        found = {depth: numbers.validation_loss(view.units(name)) for depth, name in view.results.kind(kind).items()}
        known = [(depth, loss) for depth, loss in found.items() if loss is not None]
        if known:
            first = next(iter(view.results.kind(kind).values()))
            curves.append(
                Series(
                    _kind_title(view, first),
                    view.look(first),
                    [depth for depth, _ in known],
                    [loss.mean for _, loss in known],
                    [loss.low for _, loss in known],
                    [loss.high for _, loss in known],
                )
            )
    if view.baseline is not None:
        found_loss = numbers.validation_loss(view.units(view.baseline))
        if found_loss is not None:
            level = (found_loss.mean, view.look(view.baseline), view.title(view.baseline))
    if not curves and level is None:
        return None
    ticks = sorted({int(x) for series in curves for x in np.asarray(series.x)}) or [1]
    return Panel("", curves, "depth ceiling M", "validation loss (nats)", xticks=ticks, level=level, bars=True)


def _loss_figure(view: View, panel: Panel) -> Figure:
    level = None if panel.level is None else panel.level[0]
    words = "Final validation loss against the depth ceiling that a model was trained under; lower is better, bars are "
    words += "the range over seeds."
    if level is not None and panel.series:
        under = [s.label for s in panel.series if np.asarray(s.y).max() < level]
        over = [s.label for s in panel.series if np.asarray(s.y).min() >= level]
        words += f" Below the baseline at every ceiling: {listed(under) or 'none'}."
        words += f" At or above it at every ceiling: {listed(over) or 'none'}."
    falling = [s.label for s in panel.series if len(np.asarray(s.y)) > 1 and (np.diff(np.asarray(s.y)) < 0).all()]
    words += f" The loss keeps falling as M grows for {listed(falling)}." if falling else ""
    paper = (
        "Ouro and Huginn stay at or above Standard at every ceiling; both TaH2 variants go below it and keep falling, "
        "TaH2 at M = 8 to 0.0106 nats under Standard."
    )
    alt = "Validation loss against the depth ceiling, one curve per kind of loop, Standard as a dashed line."
    return Figure("figure-loss-depth", "Loss against depth", words, alt, panels([panel], 1, 5.6, 3.9), paper)


def _compute_figure(view: View, main: list[str]) -> Figure:
    panel = Panel(
        "",
        [scaling_series(view, variant) for variant in main],
        "decoding FLOPs per response (millions)",
        "accuracy (%)",
        log2=True,
        unit=1e6,
        below=0,
    )
    assert view.baseline is not None
    baseline = _runs(view, view.baseline)
    words = "Accuracy of responses cut off at each number of tokens, against their mean decoding FLOPs; bands are 95% "
    words += "intervals over seeds and problems."
    above = _above(view, main, baseline)
    words += f" At {view.title(view.baseline)}'s best accuracy, {percent(float(baseline.mean_accuracy().max()))}%, "
    words += f"reached with {short(numbers_peak(baseline))} per response, more accurate at that mean budget: {above}."
    paper = (
        f"Standard saturates at {published.MATCHED_STANDARD}% with {published.MATCHED_TFLOPS} TFLOPs per response; "
        f"TaH2 reaches {published.MATCHED_TAH2}% at the same compute."
    )
    alt = "Accuracy against decoding FLOPs per response on a log2 axis, one curve per variant of the main table."
    height = 4.4 + 0.18 * (len(main) // 4)
    return Figure(
        "figure-compute", "Accuracy against compute", words, alt, panels([panel], 1, 7.6, height), paper,
        _points_table(view, main),
    )  # fmt: skip


def numbers_peak(runs: Runs) -> float:
    """FLOPs per response at the best accuracy."""
    return float(runs.mean_compute()[int(np.argmax(runs.mean_accuracy()))])


def _above(view: View, main: list[str], baseline: Runs) -> str:
    found = []
    for variant in main:
        if variant == view.baseline:
            continue
        paired = numbers.matched_mean(_runs(view, variant), baseline)
        if paired.gain.low > 0:
            found.append(f"{view.title(variant)} ({signed(100 * paired.gain.estimate)} points)")
    return listed(found) if found else "no variant outside its 95% interval"


def _points_table(view: View, main: list[str]) -> Table:
    rows = []
    for variant in main:
        runs = _runs(view, variant)
        cells = [
            Cell(percent(float(accuracy)), short(float(compute)))
            for accuracy, compute in zip(runs.mean_accuracy(), runs.mean_compute(), strict=True)
        ]
        rows.append(Row(Cell(view.title(variant)), tuple(cells)))
    columns = ("Variant", *(f"{cutoff} tokens" for cutoff in view.results.cutoffs))
    return Table("table-compute", "Accuracy (%) and FLOPs per response at each cutoff.", columns, tuple(rows))
