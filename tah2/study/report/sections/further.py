"""The appendix: training cost, other ceilings, validation curves, every family, votes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

import numpy as np

from tah2.config.strict import ConfigError
from tah2.study import numbers, published
from tah2.study.report.blocks import Block, Cell, Figure, Missing, Row, Section, Table
from tah2.study.report.draw.lines import Panel, Series, panels
from tah2.study.report.sections.choices import loss_cell
from tah2.study.report.sections.scaling import family, no_responses, scaling_series
from tah2.study.report.view import NOTHING, View, accuracy_cell, between, listed, percent, short, signed, times


def training_flops(view: View) -> Section:
    title = "Training FLOPs"
    names = [*view.group["main"], *view.group["budget"]]
    trained = {name: found for name in names if (found := _trained(view, name))}
    if not trained:
        return Section("training", title, (Missing("No variant of the main table has been trained yet."),))
    base = trained.get(view.baseline or "")
    rows = []
    for name, found in trained.items():
        theirs = published.TRAIN_FLOPS.get(view.key(name)) if name in view.group["main"] else None
        ratio = None if base is None else found["flops_paper"] / base["flops_paper"]
        cells = (
            Cell(f"{found['steps']:,.0f}"),
            Cell(f"{found['tokens'] / 1e6:.2f}M"),
            Cell(short(found["flops_paper"])),
            Cell(times(ratio)),
            Cell(NOTHING if theirs is None else times(theirs.ratio)),
            Cell(short(found["flops"])),
            Cell(f"{found['seconds']:,.0f}"),
        )
        rows.append(Row(Cell(view.title(name)), cells, marked=view.info(name).loop == "tah2"))
    columns = (
        "Variant", "Steps", "Tokens", "Training FLOPs", "over Standard", "in the paper", "what ran", "Seconds",
    )  # fmt: skip
    notes = (
        "Training FLOPs follow the paper's formula: three forwards, and a lookahead that re-runs a whole depth. "
        "What ran re-runs only the tokens that stopped, with the same labels. Means over seeds."
        f"{_start_words(view, trained)}"
    )
    return Section("training", title, (Table("table-training", "Cost of training.", columns, tuple(rows), notes),))


def _start_words(view: View, names: Iterable[str]) -> str:
    """What a learned updater had before the first step, and the others had not."""
    fitted: dict[str, list[str]] = {}
    for name in names:
        info = view.info(name)
        start = (info.recipe.get("model") or {}).get("start") or {}
        if info.loop in ("tah2", "tah2-fixed") and start.get("updater", "random") != "random":
            how = f"{start['steps']:,} steps of {start['batch']} states from {start['tokens']:,} tokens"
            fitted.setdefault(how, []).append(view.title(name))
    parts = [f"{how} for {listed(titles)}" for how, titles in fitted.items()]
    return f" In the seconds but not in the FLOPs: fitting the updater's start ({'; '.join(parts)})." if parts else ""


def _trained(view: View, variant: str) -> dict[str, float] | None:
    """Means over the units that have been trained."""
    found = []
    for unit in view.units(variant):
        try:
            found.append(unit.training)
        except ConfigError:
            continue
    names = ("steps", "tokens", "flops", "flops_paper", "seconds")
    known = [each for each in found if all(each.get(name) is not None for name in names)]
    return {name: mean(float(each[name]) for each in known) for name in names} if known else None


def ceilings(view: View) -> Section:
    title = "Inference ceilings other than the training one"
    names = view.group["ceiling"]
    if not names:
        missing = Missing("No model has been evaluated under another ceiling.")
        return Section("ceilings", title, (missing, _paper()), absent=not view.plans("ceiling"))
    rows, words = [], []
    for trained in dict.fromkeys(filter(None, (_trained_as(view, name) for name in names))):
        here = sorted(
            [trained, *(n for n in names if _trained_as(view, n) == trained)], key=lambda n: _ceiling(view, n)
        )
        for name in here:
            rows.append(_ceiling_row(view, name, trained))
            words += _ceiling_words(view, name, trained)
    columns = ("Model", "Inference ceiling", "Accuracy (95%)", "Change", "Mean depth", "FLOPs/token", "Validation loss")
    notes = f"No model was trained again. {' '.join(words)}"
    return Section(
        "ceilings", title, (Table("table-ceilings", "Changing the ceiling.", columns, tuple(rows), notes), _paper())
    )


def _trained_as(view: View, variant: str) -> str | None:
    """The variant whose model this one evaluates."""
    of = view.info(variant).of
    return next((unit.info.variant for unit in view.results.units if unit.info.id == of), None)


def _ceiling(view: View, variant: str) -> int:
    return view.info(variant).ceiling


def _ceiling_row(view: View, variant: str, trained: str) -> Row:
    runs, reference = view.runs(variant), view.runs(trained)
    change = Cell(NOTHING)
    if runs is not None and reference is not None and variant != trained:
        found = numbers.gain(runs, reference)
        change = Cell(signed(100 * found.estimate), between(found))
    depth = numbers.mean_depth(view.units(variant))
    cells = (
        Cell(str(_ceiling(view, variant))),
        Cell(NOTHING) if runs is None else accuracy_cell(numbers.accuracy(runs)),
        change,
        Cell(NOTHING if depth is None else f"{depth:.2f}"),
        Cell(times(view.flops_ratio(variant))),
        loss_cell(view, variant),
    )
    return Row(Cell(view.title(trained)), cells, marked=variant == trained)


def _ceiling_words(view: View, variant: str, trained: str) -> list[str]:
    runs, reference = view.runs(variant), view.runs(trained)
    if runs is None or reference is None or variant == trained:
        return []
    found = numbers.gain(runs, reference)
    verb = "raises" if found.low > 0 else "lowers" if found.high < 0 else "does not change"
    clear = "" if verb == "does not change" else f" by {abs(100 * found.estimate):.1f} points"
    how = " measurably" if not clear else ""
    return [f"A ceiling of {_ceiling(view, variant)} {verb} the accuracy of {view.title(trained)}{how}{clear}."]


def _paper() -> Table:
    rows = [
        Row(Cell(f"TaH2 M={trained}"), (Cell(str(ceiling)), Cell(f"{accuracy:.1f}"), Cell(f"{depth:.2f}")))
        for trained, ceiling, accuracy, depth in published.CEILINGS
    ]
    columns = ("Model", "Inference ceiling", "AIME24–26 (%)", "Mean depth")
    return Table("table-ceilings-paper", "The paper's ceilings.", columns, tuple(rows))


def validation_curves(view: View) -> Section:
    title = "Validation loss during post-training"
    curves = [curve for name in view.group["main"] if (curve := _curve(view, name)) is not None]
    if not curves:
        return Section("curves", title, (Missing("No training log holds validations."),))
    levels = [value for curve in curves for value in np.asarray(curve.y)[len(np.asarray(curve.y)) // 3 :]]
    whole = Panel("(a) all of training", curves, "step", "validation loss (nats)")
    late = [_late(curve) for curve in curves]
    close = Panel("(b) the last two thirds", late, "step", "validation loss (nats)")
    drawing = panels([whole, close] if len(levels) > len(curves) else [whole], 2, 8.6, 4.3)
    lowest = min(curves, key=lambda curve: float(np.asarray(curve.y)[-1]))
    words = (
        "Validation loss while training, along inference's own routes, mean over seeds, with their range as a band. "
        f"{lowest.label} ends lowest, at {float(np.asarray(lowest.y)[-1]):.4f}. {_throughout(view, curves)}"
    )
    paper = "Both TaH2 variants stay below Standard throughout; deeper is lower; adaptive TaH2 ends lowest."
    alt = "Validation loss against training step, one curve per variant of the main table."
    return Section("curves", title, (Figure("figure-curves", title, words, alt, drawing, paper),))


def _curve(view: View, variant: str) -> Series | None:
    """Mean and range over the seeds, at the steps that all of them validated."""
    runs = []
    for unit in view.units(variant):
        try:
            runs.append({int(point["step"]): _loss_of(point) for point in unit.curve})
        except (ConfigError, FileNotFoundError, KeyError):
            continue
    runs = [run for run in runs if run]
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    if not steps:
        return None
    values = np.array([[run[step] for step in steps] for run in runs])
    look = view.look(variant)
    band = (values.min(0), values.max(0)) if len(runs) > 1 else (None, None)
    return Series(view.title(variant), look, steps, values.mean(0), *band)


def _loss_of(point: dict[str, float]) -> float:
    return float(point["loss"] if "loss" in point else point["loss/prediction"])


def _late(curve: Series) -> Series:
    begin = len(np.asarray(curve.x)) // 3
    low, high = (None if side is None else np.asarray(side)[begin:] for side in (curve.low, curve.high))
    return Series(curve.label, curve.look, np.asarray(curve.x)[begin:], np.asarray(curve.y)[begin:], low, high)


def _throughout(view: View, curves: Sequence[Series]) -> str:
    base = next((curve for curve in curves if view.baseline and curve.label == view.title(view.baseline)), None)
    if base is None:
        return ""
    reference = dict(zip(*base.points, strict=True))
    below = []
    for curve in curves:
        later = [(x, y) for x, y in zip(*curve.points, strict=True) if x in reference and x > 0]
        if curve is not base and later and all(y < reference[x] for x, y in later):
            below.append(curve.label)
    return f"Below {base.label} at every validation after the start: {listed(below)}." if below else (
        f"No variant stays below {base.label} at every validation."
    )  # fmt: skip


def families(view: View) -> Section:
    title = "Every family of problems"
    names = [name for name in (view.baseline, *view.results.kind("tah2").values()) if name and view.runs(name)]
    tasks = [task for task in view.results.tasks if all(view.runs(name, task) for name in names)]
    if len(names) < 2 or not tasks:
        return Section("families", title, (no_responses(),))
    content = [
        Panel(
            family(task), [scaling_series(view, name, task=task) for name in names], "FLOPs per response (millions)",
            "accuracy (%)", log2=True, unit=1e6, below=0,
        )
        for task in tasks
    ]  # fmt: skip
    rows = -(-len(tasks) // 3)
    drawing = panels(content, min(3, len(tasks)), 8.6, 0.6 + 2.5 * rows, share_y=True)
    best = [_best(view, names, task) for task in tasks]
    ours = [family(task) for task, name in zip(tasks, best, strict=True) if name != view.baseline]
    words = (
        "Accuracy against decoding FLOPs per response, family by family; bands are 95% intervals. TaH2 gives the most "
        f"accurate whole responses in {listed(ours) if ours else 'no family'}"
        f"{'' if len(ours) == len(tasks) or not ours else ', the baseline in the others'}."
    )
    paper = "On each of six math benchmarks, TaH2 at M = 2, 4 and 8 lies above Standard once responses are long."
    alt = f"Panels of accuracy against FLOPs for {listed([family(task) for task in tasks])}."
    return Section("families", title, (Figure("figure-families", title, words, alt, drawing, paper),))


def _best(view: View, names: Sequence[str], task: str) -> str:
    runs = {name: view.runs(name, task) for name in names}
    return max(names, key=lambda name: 0.0 if (one := runs[name]) is None else float(one.mean_accuracy()[-1]))


def votes(view: View) -> Section:
    title = "Majority votes"
    found = {name: vote for name in view.group["main"] if (vote := numbers.votes(view.units(name))) is not None}
    if not found:
        return Section("votes", title, (Missing("Votes need several responses per problem."),))
    curves = [
        Series(
            view.title(name), view.look(name), vote.compute, 100 * vote.accuracy,
            100 * vote.by_unit.min(0), 100 * vote.by_unit.max(0),
        )
        for name, vote in found.items()
    ]  # fmt: skip
    most = min(len(vote.accuracy) for vote in found.values())
    panel = Panel("", curves, "decoding FLOPs per problem (millions)", "cons@n (%)", log2=True, unit=1e6)
    base = found.get(view.baseline or "")
    words = f"Accuracy of the majority answer of n = 1 to {most} responses, against the FLOPs of all of them; expected "
    words += "over all draws without replacement. Bands are the range over seeds."
    if base is not None:
        ahead = [view.title(name) for name, vote in found.items() if vote.accuracy[-1] > base.accuracy[-1]]
        words += (
            f" At n = {most} ahead of the baseline's {percent(float(base.accuracy[-1]))}%: {listed(ahead) or 'none'}."
        )
    paper = "cons@32 on AIME24–26 reaches 27.3 to 29.3% for TaH2 at M = 2 to 8, and 21.9% for Standard."
    alt = "Accuracy of majority votes against decoding FLOPs per problem, one curve per variant."
    blocks: tuple[Block, ...] = (
        Figure("figure-votes", title, words, alt, panels([panel], 1, 7.2, 4.4), paper, _votes_table(view, found, most)),
    )
    return Section("votes", title, blocks)


def _votes_table(view: View, found: dict[str, numbers.Votes], most: int) -> Table:
    shown = sorted({1, 2, most} | {n for n in (4, 8, 16, 32) if n < most})
    rows = [
        Row(Cell(view.title(name)), tuple(Cell(percent(float(vote.accuracy[n - 1]))) for n in shown))
        for name, vote in found.items()
    ]
    return Table("table-votes", "cons@n (%).", ("Variant", *(f"n = {n}" for n in shown)), tuple(rows))
