"""Inside the deepest models: which tokens loop, and what their attention reads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tah2.evals.records import SampleRecord
from tah2.study.analyses.pooling import pooled_classes
from tah2.study.analyses.run import MAPS
from tah2.study.layout import UnitResult
from tah2.study.report.blocks import Block, Figure, Missing, Raw, Section
from tah2.study.report.draw.attention import draw_all_heads, draw_maps, draw_mass
from tah2.study.report.draw.depths import depth_html, draw_by_class, draw_depth_maps, key_html
from tah2.study.report.sections.scaling import family
from tah2.study.report.view import ANALYSES, View, listed

LONGEST = 120
"""Tokens of a response that the page shows"""


def depth_maps(view: View) -> Section:
    title = "Depth token by token"
    deciders = list(view.results.kind("tah2").values())
    if not deciders:
        return Section("depths", title, (Missing("This study has no variant with a decider."),))
    variant = deciders[-1]
    blocks: list[Block] = []
    responses = _sampled(view, variant)
    if responses:
        ceiling = view.info(variant).ceiling
        blocks.append(_maps_figure(view, variant, responses, ceiling))
        blocks.append(Raw(_as_text(responses, ceiling)))
    elif forced := view.analyses(variant, "depths"):
        blocks.append(_maps_figure(view, variant, forced[0]["maps"], forced[0]["ceiling"], "validation"))
        blocks.append(Raw(_as_text(forced[0]["maps"], forced[0]["ceiling"])))
    else:
        blocks.append(Missing(f"{view.title(variant)} has no responses to show yet."))
    for name in dict.fromkeys([view.subject if view.subject in deciders else variant, variant]):
        parts = view.analyses(str(name), "depths")
        if parts:
            blocks.append(_class_figure(view, str(name), parts))
    if not any(isinstance(block, Figure) and block.name.startswith("figure-depth-class") for block in blocks):
        blocks.append(Missing("Depths by kind of token have not been analysed yet."))
    return Section("depths", title, tuple(blocks))


def _sampled(view: View, variant: str) -> list[dict[str, Any]]:
    """One correct response of each family (any response where none is correct), of the first unit that has them."""
    for unit in view.units(variant):
        found = [_response(unit, task) for task in sorted({row.task for row in unit.grades})]
        shown = [each for each in found if each is not None]
        if shown:
            return shown
    return []


def _response(unit: UnitResult, task: str) -> dict[str, Any] | None:
    right = {(row.problem, row.repeat) for row in unit.grades if row.task == task and row.correct}
    records = [record for record in unit.records(task) if record.depths and record.token_ids]
    chosen = next((record for record in records if record.key in right), records[0] if records else None)
    if chosen is None:
        return None
    words = _words(chosen)[:LONGEST]
    depths = chosen.depths[: len(words)]
    verdict = "correct" if chosen.key in right else "not correct"
    title = f"{family(task)} ({verdict})"
    return {"title": title, "words": words, "depths": depths, "mean": sum(depths) / max(1, len(depths))}


def _words(record: SampleRecord) -> list[str]:
    """The text of each token: the pocket world writes one word per token; elsewhere ids stand for them."""
    words = record.text.split()
    if len(words) < len(record.token_ids) <= len(words) + 1:
        words.append("⏹")  # the end token, which the text leaves out
    if len(words) != len(record.token_ids):
        words = [str(token) for token in record.token_ids]
    return [f"{word} " for word in words]


def _maps_figure(
    view: View, variant: str, responses: Sequence[Mapping[str, Any]], ceiling: int, which: str = "sampled"
) -> Figure:
    responses = [_shortened(one) for one in responses]
    means = [f"{one['mean']:.2f} in {one['title']}" for one in responses]
    what = "One sampled response per family" if which == "sampled" else "Validation responses under teacher forcing"
    words = (
        f"{what} of {view.title(variant)}, each token on the shade of the iterations that its prediction took; "
        f"deeper is darker. Mean depths: {listed(means)}."
    )
    paper = (
        "Sampled responses of TaH2 at M = 8: mean depth falls from 2.46 to 1.29 along the OlympiadBench response and "
        "from 3.31 to 1.04 along the HumanEval one."
    )
    alt = f"Text of {len(responses)} responses with tokens shaded by depth; the text follows below the figure."
    drawing = draw_depth_maps(responses, ceiling)
    return Figure("figure-depth-maps", f"Depth of {which} responses", words, alt, drawing, paper)


def _shortened(response: Mapping[str, Any]) -> dict[str, Any]:
    """Its first tokens; the mean is that of what is shown."""
    depths = list(response["depths"])[:LONGEST]
    mean = sum(depths) / max(1, len(depths))
    return {**response, "words": list(response["words"])[:LONGEST], "depths": depths, "mean": mean}


def _as_text(responses: Sequence[Mapping[str, Any]], ceiling: int) -> str:
    parts = [f"<h3>{one['title']}, mean depth {one['mean']:.2f}</h3>{depth_html(one, ceiling)}" for one in responses]
    return f"<details><summary>The responses as text</summary>{key_html(ceiling)}{''.join(parts)}</details>"


def _class_figure(view: View, variant: str, parts: Sequence[Mapping[str, Any]]) -> Figure:
    pooled = pooled_classes(parts)
    ceiling = int(parts[0]["ceiling"])
    ranked = sorted(pooled, key=lambda name: -pooled[name]["mean"])
    hops = [name for name in pooled if name.startswith("hop ")]
    words = (
        f"Validation tokens of {view.title(variant)} by kind: shares by number of iterations, and mean depth. "
        f"Deepest: {ranked[0]} ({pooled[ranked[0]]['mean']:.2f}); shallowest: {ranked[-1]} "
        f"({pooled[ranked[-1]]['mean']:.2f}). {_hops(pooled, hops)}"
    )
    alt = f"Stacked bars of depths for {len(pooled)} kinds of tokens."
    name = f"figure-depth-class-{variant}"
    return Figure(name, f"Depth by kind of token, {view.title(variant)}", words, alt, draw_by_class(pooled, ceiling))


def _hops(pooled: Mapping[str, Mapping[str, Any]], hops: Sequence[str]) -> str:
    """Do tokens that need more serial steps get more iterations?"""
    if len(hops) < 2:
        return ""
    means = [pooled[name]["mean"] for name in hops]
    rising = sum(after > before + 0.005 for before, after in itertools.pairwise(means))
    return (
        f"A token of k hops needs k serial steps: mean depth rises in {rising} of {len(hops) - 1} steps from "
        f"{hops[0]} ({means[0]:.2f}) to {hops[-1]} ({means[-1]:.2f})."
    )


def cross_attention(view: View) -> Section:
    title = "Attention across iterations"
    deepest = next(reversed(view.results.kind("tah2").values()), None)
    unit = next((unit for unit in view.units(deepest) if view.analysis(unit, "attention")), None) if deepest else None
    if unit is None:
        return Section("attention", title, (Missing("No variant's attention has been analysed yet."),))
    found = view.analysis(unit, "attention")
    assert found is not None
    return Section("attention", title, tuple(_attention_blocks(view, unit, found)))


def _attention_blocks(view: View, unit: UnitResult, found: Mapping[str, Any]) -> list[Block]:
    heads = found["heads"]
    who = f"{unit.info.title}, base seed {unit.info.base_seed}"
    shares = [f"{100 * head['mean'][0] / sum(head['mean']):.0f}%" for head in heads]
    words = (
        f"Mass that response queries at iteration {found['depth']} of {who} give to keys of each iteration, in the "
        "head with most mass on the first iteration, the one with most on later ones, and the most even one: "
        f"{listed(shares)} on the first. Means over {found['sequences']} validation sequences, whiskers are one "
        "standard deviation over them."
    )
    if found["depth"] < found["ceiling"]:
        words += (
            f" Fewer than a quarter of the sequences hold a token that runs longer than {found['depth']} iterations."
        )
    paper = (
        "In TaH2 at M = 8 different heads attend mainly to first-iteration states, to later ones, or to both "
        "(100 validation sequences, queries at iteration 8)."
    )
    alt = "Bars of attention mass by iteration of the keys for three heads."
    blocks: list[Block] = [Figure("figure-attention-mass", "Attention mass", words, alt, draw_mass(heads), paper)]
    every = np.asarray(found["mean"])
    later = 1 - every[..., 0] / every.sum(-1)
    words = f"Mass beyond the first iteration in every head: from {later.min():.2f} to {later.max():.2f}."
    alt = "Heat map of layers by heads."
    blocks.append(Figure("figure-attention-heads", "All heads", words, alt, draw_all_heads(every)))
    path = view.results.root / ANALYSES / unit.info.id / MAPS
    if path.is_file():
        with np.load(path) as arrays:
            maps = arrays["maps"].astype(np.float64)
        words = (
            "Mean attention weights of the same heads over the first response positions, one row per iteration of the "
            "keys, on one logarithmic scale. Prompt keys are left out and nothing is renormalised; grey marks where "
            f"no query reached iteration {found['depth']}."
        )
        alt = "Grid of attention maps: columns are heads, rows are iterations of the keys."
        blocks.append(Figure("figure-attention-maps", "Attention maps", words, alt, draw_maps(heads, maps)))
    return blocks
