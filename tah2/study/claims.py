"""The paper's claims beside what a study found; whether one holds is computed, never written down.

A claim holds when the data show it: where there is an interval, when all of it lies on the claimed side; where models
are compared one by one, when every one of them does. That two are alike holds when the whole interval lies within
`ALIKE`, not when the data cannot tell. A claim whose variants the study does not run is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tah2.config.strict import ConfigError
from tah2.study import numbers
from tah2.study.claim import Check, Claim, points, shown, title_of
from tah2.study.claims_tokens import many_tokens_gain_nothing, slower_by_less_than_fixed, the_decider_knows
from tah2.study.layout import Results, UnitResult

ALIKE = 0.02
"""Accuracies that differ by less are called the same."""
DEPTH = 1.35
"""Iterations per token that are still called few."""


def claims_of(results: Results) -> list[dict[str, Any]]:
    from tah2.study.summary import main_variant

    main = main_variant(results)
    found = []
    for check in CHECKS:
        try:
            found += [vars(claim) for claim in check(results, main)]
        except ConfigError:  # a variant, or its responses, that this study does not have
            continue
    return found


def lower_loss(results: Results, main: str) -> Iterator[Claim]:
    ours, base = _losses(results, main), _losses(results, results.baseline)
    pairs = _paired(ours, base)
    worst = max(mine - its for mine, its in pairs)
    yield Claim(
        f"{title_of(results, main)} has a lower validation loss than {title_of(results, results.baseline)}",
        "lower at every ceiling, and throughout training",
        f"{_mean(ours):.4f} against {_mean(base):.4f}; closest pair of seeds {worst:+.4f}",
        worst < 0,
    )


def steeper_slope(results: Results, main: str) -> Iterator[Claim]:
    mine, base = numbers.runs_of(results, main), numbers.runs_of(results, results.baseline)
    ratio = numbers.slope(mine).line.slope / max(1e-12, numbers.slope(base).line.slope)
    difference = numbers.slope_difference(mine, base)
    yield Claim(
        f"{title_of(results, main)} gains more accuracy per doubling of decoding FLOPs than the baseline",
        "2.74 against 1.79 points (+53%)",
        f"{points(numbers.slope(mine).line.slope)} against {points(numbers.slope(base).line.slope)} points "
        f"({ratio - 1:+.0%}); difference {shown(difference)}",
        difference.low > 0,
    )


def beats_baseline(results: Results, main: str) -> Iterator[Claim]:
    """At a mean budget that both spend as well as they can, and with one cutoff for all responses."""
    mine, base = numbers.runs_of(results, main), numbers.runs_of(results, results.baseline)
    found = numbers.matched_mean(mine, base)
    yield Claim(
        f"{title_of(results, main)} is more accurate than the baseline's best at the same mean decoding FLOPs",
        "+3.4 points (15.4 against 12.0)",
        f"{shown(found.gain)} points ({points(found.accuracy)} against {points(found.baseline)})",
        found.gain.low > 0,
    )
    cut = numbers.matched(mine, base)
    if cut is not None:
        yield Claim(
            f"{title_of(results, main)} is so with one output cutoff for all responses, too",
            "+3.4 points, where longer outputs no longer help the baseline",
            f"{shown(cut.gain)} points ({points(cut.accuracy)} against {points(cut.baseline)})",
            cut.gain.low > 0,
        )


def beats_loops(results: Results, main: str) -> Iterator[Claim]:
    mine = numbers.runs_of(results, main)
    for kind in ("ouro", "ouro-adaptive", "huginn", "tah2-fixed"):
        for name in results.kind(kind).values():
            found = numbers.matched_mean(mine, numbers.runs_of(results, name))
            yield Claim(
                f"{title_of(results, main)} is more accurate than {title_of(results, name)} at the mean decoding FLOPs "
                "where that is at its best",
                "above every other loop over the whole range",
                f"{shown(found.gain)} points",
                found.gain.low > 0,
            )


def loops_underperform(results: Results, main: str) -> Iterator[Claim]:
    base = numbers.runs_of(results, results.baseline)
    for kind in ("ouro", "ouro-adaptive", "huginn"):
        for name in results.kind(kind).values():
            found = numbers.matched_mean(numbers.runs_of(results, name), base)
            yield Claim(
                f"{title_of(results, name)} stays below the baseline at the mean decoding FLOPs where that is at its "
                "best",
                "below it over the overlapping range",
                f"{shown(found.gain)} points",
                found.gain.high < 0,
            )


def loops_are_steeper(results: Results, main: str) -> Iterator[Claim]:
    base = numbers.runs_of(results, results.baseline)
    published = {("ouro", 2): "2.12", ("ouro-adaptive", 2): "2.27", ("huginn", 3): "2.26"}
    for (kind, depth), paper in published.items():
        name = results.kind(kind).get(depth)
        if name is None:
            continue
        difference = numbers.slope_difference(numbers.runs_of(results, name), base)
        yield Claim(
            f"{title_of(results, name)} has a steeper slope than the baseline",
            f"{paper} against 1.79 points per doubling",
            f"difference {shown(difference)} points per doubling",
            difference.low > 0,
        )


def depth_scaling(results: Results, main: str) -> Iterator[Claim]:
    rows = results.kind("tah2")
    for (shallow, first), (deep, second) in zip(rows.items(), list(rows.items())[1:], strict=False):
        pairs = _paired(_losses(results, second), _losses(results, first))
        worst = max(mine - its for mine, its in pairs)
        yield Claim(
            f"TaH2's validation loss falls from M = {shallow} to M = {deep}",
            "lower at every higher ceiling",
            f"{_mean(_losses(results, first)):.4f} to {_mean(_losses(results, second)):.4f}; "
            f"{sum(mine < its for mine, its in pairs)} of {len(pairs)} pairs of seeds lower",
            worst < 0,
        )
    base = numbers.runs_of(results, results.baseline)
    names = list(rows.values())
    if len(names) > 1:
        gains = [numbers.gain(numbers.runs_of(results, name), base) for name in names]
        difference = numbers.gain(numbers.runs_of(results, names[-1]), numbers.runs_of(results, names[0]))
        yield Claim(
            f"TaH2's gain in accuracy grows from M = {min(rows)} to M = {max(rows)}",
            "+2.8 to +3.9 points from M = 2 to M = 8",
            " to ".join(shown(gain) for gain in gains) + " points",
            difference.low > 0,
        )


def fixed_loops_plateau(results: Results, main: str) -> Iterator[Claim]:
    for kind in ("ouro", "huginn"):
        names = results.kind(kind)
        if len(names) > 1:
            shallow, deep = names[min(names)], names[max(names)]
            found = numbers.gain(numbers.runs_of(results, deep), numbers.runs_of(results, shallow))
            yield Claim(
                f"{title_of(results, deep)} gains less than {100 * ALIKE:.0f} points over {title_of(results, shallow)}",
                "existing looped models plateau as depth grows",
                f"{shown(found)} points",
                found.high < ALIKE,
            )


def shallow_on_average(results: Results, main: str) -> Iterator[Claim]:
    depths = [depth for unit in results.of(main) if (depth := numbers.mean_depth([unit])) is not None]
    mine, base = numbers.flops_per_token(results.of(main)), numbers.flops_per_token(results.of(results.baseline))
    if depths and mine is not None and base is not None:
        yield Claim(
            f"Every model of {title_of(results, main)} runs fewer than {DEPTH} iterations per token",
            "a mean depth of 1.23, 1.21x decoding FLOPs",
            f"{min(depths):.2f} to {max(depths):.2f}, {mine / base:.2f}x decoding FLOPs",
            max(depths) < DEPTH,
        )


def ablations(results: Results, main: str) -> Iterator[Claim]:
    for group, paper in (("ablation", ABLATIONS), ("ours", {})):
        for name in results.group(group):
            pair = numbers.same_seeds(results, name, main)
            if pair is None:
                continue
            found = numbers.gain(*pair)
            differs = results.of(name)[0].info.differs or title_of(results, name)
            loss = _mean(_losses(results, name)) - _mean(_losses(results, main, like=name))
            yield Claim(
                f"Without it TaH2 is less accurate: {differs}",
                paper.get(name, "not in the paper: this is ours"),
                f"{shown(found)} points, validation loss {loss:+.4f}",
                found.high < 0,
            )


ABLATIONS = {
    "top1-mismatch": "-1.1 points",
    "uniform-weights": "-3.6 points",
    "coverage-1": "-1.9 points",
    "sampled": "-1.3 points",
    "top-k-embedding": "-2.1 points",
    "final-output": "-1.0 points",
}
"""Published differences by the name that a study gives the variant."""


def other_ceilings(results: Results, main: str) -> Iterator[Claim]:
    for name in results.group("ceiling"):
        info = results.of(name)[0].info
        trained = next(unit.info.variant for unit in results.units if unit.info.id == info.of)
        found = numbers.gain(numbers.runs_of(results, name), numbers.runs_of(results, trained))
        if info.ceiling < info.max_depth:
            yield Claim(
                f"Under a ceiling of {info.ceiling} {title_of(results, trained)} loses accuracy",
                "2.7 to 3.1 points lost at 4 instead of 8",
                f"{shown(found)} points",
                found.high < 0,
            )
        else:
            yield Claim(
                f"Under a ceiling of {info.ceiling} {title_of(results, trained)} stays as accurate, within "
                f"{100 * ALIKE:.0f} points",
                "unchanged at 12 instead of 8",
                f"{shown(found)} points",
                found.low > -ALIKE and found.high < ALIKE,
            )


def more_votes(results: Results, main: str) -> Iterator[Claim]:
    mine, base = numbers.votes(results.of(main)), numbers.votes(results.of(results.baseline))
    if mine is not None and base is not None:
        n = min(len(mine.accuracy), len(base.accuracy))
        lead = mine.by_unit[:, n - 1].min() - base.by_unit[:, n - 1].max()
        yield Claim(
            f"Every model of {title_of(results, main)} is ahead of every baseline in majority votes too (cons@{n})",
            "27.3 against 21.9 at cons@32",
            f"{points(mine.accuracy[n - 1])} against {points(base.accuracy[n - 1])}",
            bool(lead > 0),
        )


def budget_alone(results: Results, main: str) -> Iterator[Claim]:
    for name in results.group("budget"):
        found = numbers.gain(numbers.runs_of(results, main), numbers.runs_of(results, name))
        times = results.of(name)[0].training["steps"] / results.of(main)[0].training["steps"]
        yield Claim(
            f"Budget alone does not catch up: {title_of(results, name)} ({times:.1f}x the steps) stays below",
            "not in the paper: a control of ours",
            f"{shown(found)} points",
            found.low > 0,
        )


def other_sizes(results: Results, main: str) -> Iterator[Claim]:
    names = results.group("size")
    bases = dict.fromkeys(results.of(name)[0].info.base for name in names)
    for base in bases:
        here = {results.of(name)[0].info.loop: name for name in names if results.of(name)[0].info.base == base}
        if {"standard", "tah2"} <= here.keys():
            found = numbers.gain(numbers.runs_of(results, here["tah2"]), numbers.runs_of(results, here["standard"]))
            yield Claim(
                f"TaH2 beats the baseline at another size too ({base})",
                "+3.2 points at 4B, +2.4 at 8B",
                f"{shown(found)} points",
                found.low > 0,
            )


CHECKS: tuple[Check, ...] = (
    steeper_slope,
    beats_baseline,
    beats_loops,
    loops_are_steeper,
    loops_underperform,
    lower_loss,
    depth_scaling,
    fixed_loops_plateau,
    shallow_on_average,
    ablations,
    other_ceilings,
    more_votes,
    budget_alone,
    other_sizes,
    many_tokens_gain_nothing,
    the_decider_knows,
    slower_by_less_than_fixed,
)


Losses = dict[tuple[int, int], float]
"""Validation loss by (base seed, seed)."""


def _losses(results: Results, name: str, like: str | None = None) -> Losses:
    """Of the seeds that the variant `like` has too."""
    found = {_seeds(unit): float(unit.validation["loss"]) for unit in results.of(name)}
    if like is not None:
        kept = {_seeds(unit) for unit in results.of(like)}
        found = {seeds: loss for seeds, loss in found.items() if seeds in kept}
    if not found:
        raise ConfigError(f"{name} and {like} share no seeds.")
    return found


def _seeds(unit: UnitResult) -> tuple[int, int]:
    return unit.info.base_seed, unit.info.seed


def _paired(ours: Losses, theirs: Losses) -> list[tuple[float, float]]:
    shared = ours.keys() & theirs.keys()
    if not shared:
        raise ConfigError("Two variants share no seeds.")
    return [(ours[seeds], theirs[seeds]) for seeds in sorted(shared)]


def _mean(losses: Losses) -> float:
    return sum(losses.values()) / len(losses)
