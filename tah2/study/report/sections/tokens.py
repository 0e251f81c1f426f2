"""Token by token: gains of fixed loops, and the decider's judgement of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tah2.study import published
from tah2.study.analyses.pooling import pooled_alignment, pooled_gains
from tah2.study.report.blocks import Cell, Figure, Missing, Row, Section, Table
from tah2.study.report.draw.tokens import FEWEST, draw_alignment, draw_gains
from tah2.study.report.view import NOTHING, View, between_numbers, listed, percent, signed


def gain_distribution(view: View) -> Section:
    found = [
        (variant, pooled_gains(parts))
        for variant in view.group["main"]
        if view.info(variant).loop not in ("tah2", _same_backbone(view)) and (parts := view.analyses(variant, "gains"))
    ]
    title = "Does every token gain from looping?"
    if not found:
        fixed = any(view.info(variant).loop not in ("standard", "tah2") for variant in view.group["main"])
        missing = Missing("No fixed-depth loop has been analysed for gains yet.")
        return Section("gains", title, (missing,), absent=bool(view.group["main"]) and not fixed)
    return Section("gains", title, (_gain_figure(view, found),))


def _same_backbone(view: View) -> str:
    """Run to the ceiling, Ouro with its gate is Ouro: not shown twice."""
    return "ouro-adaptive" if view.results.kind("ouro") else ""


def _shallowest(view: View, found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The first of each kind, titled; the table has all."""
    kinds = dict.fromkeys(view.info(variant).loop for variant, _ in found)
    firsts = [next(each for each in found if view.info(each[0]).loop == kind) for kind in kinds]
    return [(view.title(variant), gains) for variant, gains in firsts][:4]


def _gain_figure(view: View, found: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    shown = _shallowest(view, found)
    wasted = [
        f"{title}: {percent(gains['little'])}% change little and {percent(gains['worse'])}% become worse"
        for title, gains in shown
    ]
    words = (
        "How the loss of each validation token changes from the first to the final iteration, when every token runs "
        f"all of them. {'; '.join(wasted)}."
    )
    words += f" {_most_do_not_gain(shown)}"
    paper = (
        "Ouro at M = 2: 52.3% of tokens change by at most 0.001 nats and 21.7% become worse by more; Huginn at M = 3: "
        "33.5% and 15.9%."
    )
    alt = f"Histograms of the loss reduction per token for {listed([title for title, _ in shown])}, in three regions: "
    alt += "worse, little change, better."
    return Figure(
        "figure-gains", "Gains of fixed-depth looping", words, alt, draw_gains(shown), paper, _gain_table(view, found)
    )


def _most_do_not_gain(shown: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    most = [title for title, gains in shown if gains["better"] < 0.5]
    if len(most) == len(shown):
        return "In each of them most tokens do not gain."
    if not most:
        return "Unlike in the paper's argument, most tokens gain in each of them."
    return f"Most tokens do not gain in {listed(most)}."


def _gain_table(view: View, found: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    rows = []
    for variant, gains in found:
        theirs = published.GAIN_SHARES.get(view.key(variant))
        cells = [Cell(percent(gains[name])) for name in ("worse", "little", "better")]
        cells += [Cell(signed(gains["mean"], 4)), Cell(signed(gains["lost"], 4)), Cell(signed(gains["won"], 4))]
        cells.append(Cell(NOTHING if theirs is None else " / ".join(f"{share:.1f}" for share in theirs)))
        cells.append(Cell(f"{gains['tokens']:,}"))
        rows.append(Row(Cell(view.title(variant)), tuple(cells)))
    columns = (
        "Variant", "Worse (%)", "Little (%)", "Better (%)", "Mean gain (nats)", "lost", "won", "Paper (%)", "Tokens",
    )  # fmt: skip
    return Table("table-gains", "Shares of tokens by what the further iterations do for them.", columns, tuple(rows))


def decider_alignment(view: View) -> Section:
    title = "Does the decider know?"
    deciders = [variant for variant in view.results.kind("tah2").values() if view.analyses(variant, "alignment")]
    if not deciders:
        return Section("alignment", title, (Missing("No variant with a decider has been analysed yet."),))
    pooled = {variant: pooled_alignment(view.analyses(variant, "alignment")) for variant in deciders}
    return Section("alignment", title, (_alignment_figure(view, pooled), _alignment_table(view, pooled)))


def _alignment_figure(view: View, pooled: Mapping[str, Mapping[str, Any]]) -> Figure:
    subject = next((variant for variant in pooled if variant == view.subject), next(iter(pooled)))
    deepest = list(pooled)[-1]
    first = pooled[subject]["depths"][0]
    content = [(f"{view.title(subject)}, after depth 1", first["bands"], pooled[subject]["threshold"])]
    if deepest != subject:
        content += [
            (f"{view.title(deepest)}, after depth {part['depth']}", part["bands"], pooled[deepest]["threshold"])
            for part in pooled[deepest]["depths"][:3]
        ]
    words = (
        "Mean loss reduction of one more pass, by the decider's continue probability; bars are 95% intervals over "
        f"documents, the area of a dot grows with its tokens, bands of fewer than {FEWEST} are left out. "
        f"{_verdict(first, pooled[subject]['threshold'])}"
    )
    paper = (
        "For TaH2 at M = 2, probabilities near zero go with negative or negligible gains, the mean gain rises with the "
        "probability, and near the threshold of 0.5 it is near zero."
    )
    alt = "Mean gain of a further pass against continue probability, with the threshold as a vertical line."
    return Figure("figure-alignment", "Gain against continue probability", words, alt, draw_alignment(content), paper)


def _verdict(first: Mapping[str, Any], threshold: float) -> str:
    stopped, continued, near = first["stopped"], first["continued"], first["near_threshold"]
    words = []
    if stopped["gain"] is not None and continued["gain"] is not None:
        words.append(
            f"Tokens that stop would gain {signed(stopped['gain'], 3)} nats, tokens that continue gain "
            f"{signed(continued['gain'], 3)}."
        )
    if near["gain"] is None:
        words.append(f"No token came within 0.1 of the threshold of {threshold:g}.")
    else:
        low, high = near["interval"]
        at_zero = "not distinguishable from zero" if low <= 0 <= high else "above zero" if low > 0 else "below zero"
        words.append(
            f"Within 0.1 of the threshold of {threshold:g} ({near['tokens']:,} of {first['tokens']:,} tokens) the mean "
            f"gain is {signed(near['gain'], 3)} nats "
            f"({between_numbers(low, high, 3)}), {at_zero}."
        )
    gains = [band["gain"] for band in first["bands"] if band["tokens"]]
    rising = sum(after >= before for before, after in pairwise(gains))
    if len(gains) > 2:
        words.append(f"The gain rises in {rising} of {len(gains) - 1} steps from one band to the next.")
    return " ".join(words)


def _alignment_table(view: View, pooled: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for variant, found in pooled.items():
        for part in found["depths"]:
            cells = [Cell(str(part["depth"])), Cell(f"{part['tokens']:,}")]
            share = part["continued"]["tokens"] / max(1, part["tokens"])
            cells.append(Cell(f"{100 * share:.1f}"))
            cells += [_gain_cell(part[name]) for name in ("stopped", "near_threshold", "continued")]
            correlation = part["correlation"]
            cells.append(Cell(NOTHING if correlation is None else f"{correlation:.2f}".replace("-", "−")))
            rows.append(Row(Cell(view.title(variant)), tuple(cells), marked=variant == view.subject))
    columns = (
        "Variant", "After depth", "Tokens", "Continue (%)", "Gain where it stops", "near the threshold",
        "where it continues", "Rank correlation",
    )  # fmt: skip
    notes = "Gains in nats of one more pass, along the decider's own routes; for tokens that stop, from a lookahead."
    return Table("table-alignment", "What the decider knew, depth by depth.", columns, tuple(rows), notes)


def _gain_cell(band: Mapping[str, Any]) -> Cell:
    if band["gain"] is None or np.isnan(band["gain"]):
        return Cell(NOTHING)
    low, high = band["interval"]
    return Cell(signed(band["gain"], 3), between_numbers(low, high, 3))
