"""Claims about single tokens and about time, from the analyses of trained models and the measured runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tah2.study.analyses.pooling import pooled_alignment, pooled_gains
from tah2.study.claim import Claim, title_of
from tah2.study.layout import Results

NEGLIGIBLE = 0.01
"""Nats: a gain below it is called negligible."""
NEAR_ZERO = 0.1
"""Nats: a gain this close to zero is called near it."""


def analyses_of(results: Results, variant: str, name: str) -> list[dict[str, Any]]:
    """What an analysis found of every unit of a variant; empty before it has run."""
    paths = [results.root / "analyses" / unit.info.id / f"{name}.json" for unit in results.of(variant)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def many_tokens_gain_nothing(results: Results, main: str) -> Iterator[Claim]:
    published = {("ouro", 2): "52.3% change little, 21.7% get worse", ("huginn", 3): "33.5% and 15.9%"}
    for (kind, depth), paper in published.items():
        variant = results.kind(kind).get(depth)
        parts = [] if variant is None else analyses_of(results, variant, "gains")
        if variant is not None and parts:
            found, who = pooled_gains(parts), title_of(results, variant)
            yield Claim(
                f"Fixed iterations help few tokens: most change little or get worse in every model of {who}",
                paper,
                f"{found['little']:.1%} change little, {found['worse']:.1%} get worse",
                all(part["little"] + part["worse"] > 0.5 for part in parts),
            )


def the_decider_knows(results: Results, main: str) -> Iterator[Claim]:
    parts = analyses_of(results, main, "alignment")
    if not parts:
        return
    first = pooled_alignment(parts)["depths"][0]
    stopped, continued, near = first["stopped"], first["continued"], first["near_threshold"]
    yield Claim(
        f"Tokens that {title_of(results, main)} lets stop would gain nothing, those that continue gain",
        "negative or negligible near probability 0, growing with it",
        f"{_band(stopped)} where it stops, {_band(continued)} where it continues",
        bool(stopped["tokens"] and continued["tokens"])
        and stopped["interval"][1] < NEGLIGIBLE
        and continued["interval"][0] > 0,
    )
    yield Claim(
        f"At the decision threshold the gain of another iteration is within {NEAR_ZERO} nats of zero",
        "near zero at 0.5",
        f"{_band(near)} near the threshold",
        bool(near["tokens"]) and near["interval"][0] > -NEAR_ZERO and near["interval"][1] < NEAR_ZERO,
    )


def _band(band: dict[str, Any]) -> str:
    if not band["tokens"]:
        return "no token"
    low, high = band["interval"]
    return f"{band['gain']:+.2f} [{low:+.2f}, {high:+.2f}] nats ({band['tokens']} tokens)"


def slower_by_less_than_fixed(results: Results, main: str) -> Iterator[Claim]:
    rows = {(row["variant"], row["batch"]): row for row in results.runtime}
    fixed = results.kind("tah2-fixed").get(results.of(main)[0].info.max_depth, "")
    for batch, paper in ((1, "1.34x against 2.35x"), (4, "1.30x against 2.19x")):
        base, ours, theirs = (rows.get((name, batch)) for name in (results.baseline, main, fixed))
        if base is not None and ours is not None and theirs is not None:
            mine, its = (row["latency_seconds"] / base["latency_seconds"] for row in (ours, theirs))
            less = [one < other for one, other in zip(_rounds(ours), _rounds(theirs), strict=True)]
            yield Claim(
                f"{title_of(results, main)} costs less time than iterating every token (batch {batch})",
                f"{paper} the baseline's latency",
                f"{mine:.2f}x against {its:.2f}x the baseline's latency; less in {sum(less)} of {len(less)} rounds",
                all(less),
            )


def _rounds(row: dict[str, Any]) -> list[float]:
    """Mean latency of each round; a measurement that did not keep its rounds has one."""
    return list(row.get("latency_rounds") or [row["latency_seconds"]])
