"""Slopes, matched compute and votes on data whose answers are known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tah2.config.strict import ConfigError
from tah2.evals.consensus import Ballot, consensus_exact, consensus_sampled
from tah2.evals.curves import (
    Curve,
    accuracy_at,
    accuracy_at_compute,
    gain_at_compute,
    peak,
    shared_range,
    slope,
)


def straight(rate: float, problems: int = 40, noise: float = 0.0, factor: float = 1.0, seed: int = 0) -> Curve:
    """Accuracy 0.1 + rate per doubling, at 1, 2, 4, 8 and 16 (times `factor`) FLOPs."""
    random = np.random.default_rng(seed)
    compute = np.full((problems, 5), factor) * 2.0 ** np.arange(5)
    level = random.normal(0, noise, (problems, 1)) + random.normal(0, noise, (problems, 5))
    return Curve.of(0.1 + rate * np.log2(compute / factor) + level, compute)


def test_a_straight_curve_has_its_slope_and_explains_everything():
    fitted = slope(straight(0.027), draws=200)
    assert fitted.line.slope == pytest.approx(0.027)
    assert fitted.line.r_squared == pytest.approx(1)
    assert (fitted.interval.low, fitted.interval.high) == pytest.approx((0.027, 0.027))


def test_the_slope_and_its_interval_are_scipys():
    curve = straight(0.02, problems=25, noise=0.1, seed=4)
    fitted = slope(curve, draws=2000, seed=11)
    x = np.log2(curve.mean_compute())
    assert fitted.line.slope == pytest.approx(stats.linregress(x, curve.mean_accuracy()).slope)

    def of_problems(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
        means = np.stack([column.mean(axis) for column in columns], -1)
        return np.asarray(means @ (x - x.mean()) / ((x - x.mean()) ** 2).sum())

    theirs = stats.bootstrap(
        tuple(curve.accuracy.T),
        of_problems,
        paired=True,
        vectorized=False,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(12),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert fitted.interval.low == pytest.approx(theirs.low, abs=0.06 * width)
    assert fitted.interval.high == pytest.approx(theirs.high, abs=0.06 * width)


def test_benchmarks_of_different_sizes_count_alike():
    curve = Curve.of([[0.0], [0.0], [0.0], [1.0]], [[1.0]] * 3 + [[3.0]], sizes=[3, 1])
    assert curve.mean_accuracy() == pytest.approx([0.5])
    assert curve.mean_compute() == pytest.approx([2.0])


def test_compute_is_interpolated_on_its_logarithm_and_never_extrapolated():
    at = accuracy_at([1.0, 4.0, 16.0], [0.0, 0.2, 0.3], 2.0)
    assert at == pytest.approx(0.1)
    assert accuracy_at([16.0, 1.0, 4.0], [0.3, 0.0, 0.2], 8.0) == pytest.approx(0.25)
    assert accuracy_at([1.0, 4.0], [0.0, 0.2], 4.0) == pytest.approx(0.2)
    assert np.isnan(accuracy_at([1.0, 4.0], [0.0, 0.2], 4.1))
    assert accuracy_at([2.0], [0.7], 2.0) == pytest.approx(0.7)
    x, y = np.random.default_rng(0).random((2, 50, 6)) + 0.1
    x.sort(-1)
    wanted = x.mean(-1)
    plain = [np.interp(np.log2(w), np.log2(row), col) for w, row, col in zip(wanted, x, y, strict=True)]
    np.testing.assert_allclose(accuracy_at(x, y, wanted), plain)


def test_accuracy_at_matched_compute_and_its_gain():
    base, looped = straight(0.02, noise=0.05), straight(0.03, noise=0.05, factor=1.2, seed=1)
    low, high = shared_range([base, looped]) or (0, 0)
    assert (low, high) == pytest.approx((1.2, 16))
    at = 8.0
    mine = accuracy_at_compute(looped, at, draws=500)
    its = accuracy_at_compute(base, at, draws=500)
    assert mine.low < mine.estimate < mine.high
    gain = gain_at_compute(looped, base, at, draws=500)
    assert gain.estimate == pytest.approx(mine.estimate - its.estimate)
    assert gain.low < gain.estimate < gain.high
    assert gain_at_compute(base, base, at, draws=500).high == 0


def test_pairs_are_resampled_together():
    base = straight(0.02, noise=0.3, seed=2)
    better = Curve.of(base.accuracy + 0.01, base.compute)
    gain = gain_at_compute(better, base, 4.0, draws=300)
    assert (gain.low, gain.high) == pytest.approx((0.01, 0.01))


def test_the_peak_is_the_cheapest_best_point():
    curve = Curve.of([[0.1, 0.3, 0.3, 0.2]], [[1, 4, 2, 8]])
    assert peak(curve) == 2
    assert shared_range([curve, Curve.of([[1.0]], [[9.0]])]) is None


def test_curves_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="one accuracy and one cost"):
        Curve.of([[0.1]], [[1.0, 2.0]])
    with pytest.raises(ConfigError, match="cannot hold"):
        Curve.of([[0.1]], [[1.0]], sizes=[2])
    with pytest.raises(ConfigError, match="positive"):
        slope(Curve.of([[0.1, 0.2]], [[0.0, 2.0]]))
    with pytest.raises(ConfigError, match="same problems"):
        gain_at_compute(straight(0.1, 3), straight(0.1, 4), 2.0)


def enumerated(answers: list[str | None], grades: list[float]) -> list[float]:
    """cons@n by looking at every subset."""
    credit = {a: np.mean([g for b, g in zip(answers, grades, strict=True) if b == a]) for a in answers if a is not None}
    values = []
    for n in range(1, len(answers) + 1):
        earned = []
        for drawn in combinations(answers, n):
            votes = {a: drawn.count(a) for a in drawn if a is not None}
            top = [a for a, count in votes.items() if count == max(votes.values())]
            earned.append(np.mean([credit[a] for a in top]) if top else 0.0)
        values.append(float(np.mean(earned)))
    return values


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.integers(0, 15))
def test_exact_votes_are_those_of_all_subsets(answers: list[str | None], right: int):
    grades = [float(right >> "abcd".index(a) & 1) if a else 0.0 for a in answers]
    np.testing.assert_allclose(consensus_exact(Ballot.of(answers, grades)), enumerated(answers, grades), atol=1e-12)


def test_a_vote_of_one_is_the_mean_grade_and_a_vote_of_all_the_majority():
    answers = ["7"] * 12 + ["8"] * 11 + [str(wrong) for wrong in range(100, 108)] + [None]
    votes = consensus_exact(Ballot.of(answers, [float(a == "7") for a in answers]))
    assert len(votes) == 32
    assert votes[0] == pytest.approx(12 / 32)
    assert votes[-1] == pytest.approx(1)


def test_sampled_votes_approach_the_exact_ones():
    answers = ["a"] * 5 + ["b"] * 4 + ["c", "d", "e", None, None]
    ballot = Ballot.of(answers, [float(a == "a") for a in answers])
    np.testing.assert_allclose(consensus_sampled(ballot, 4000), consensus_exact(ballot), atol=0.03)
    assert consensus_sampled(Ballot.of([None, None], [0, 0])).tolist() == [0, 0]
    assert consensus_exact(Ballot.of([None, None], [0, 0])).tolist() == [0, 0]


def test_the_most_answers_that_a_problem_may_have():
    spread = Ballot.of([str(i) for i in range(64)], [1.0] + [0.0] * 63)
    np.testing.assert_allclose(consensus_exact(spread), 1 / 64, atol=1e-9)
    with pytest.raises(ConfigError, match="use draws"):
        consensus_exact(Ballot((1000,), (1.0,)))
