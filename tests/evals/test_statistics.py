"""Intervals and lines are those of scipy and statsmodels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tah2.config.strict import ConfigError
from tah2.evals.statistics import Resampling, fit_line, fit_slopes, mean_interval, percentile_interval


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_of_a_mean_is_scipys(level: float):
    values = np.random.default_rng(1).random(40) < 0.3
    ours = mean_interval(values, draws=3000, level=level, seed=7)
    theirs = stats.bootstrap(
        (values.astype(float),),
        np.mean,
        n_resamples=3000,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(7),
    ).confidence_interval
    assert ours.estimate == values.mean()
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    intervals = [mean_interval(random.binomial(8, 0.4, 60) / 8, draws=400, seed=i) for i in range(300)]
    covered = np.mean([each.low <= 0.4 <= each.high for each in intervals])
    assert 0.90 <= covered <= 0.985


def test_large_benchmarks_are_resampled_in_pieces(monkeypatch: pytest.MonkeyPatch):
    values = np.random.default_rng(2).random(50)
    whole = mean_interval(values, draws=500)
    monkeypatch.setattr("tah2.evals.statistics._AT_ONCE", 1000)
    assert mean_interval(values, draws=500) == whole


def test_each_benchmark_is_resampled_from_its_own_problems():
    resampling = Resampling([3, 5], draws=200)
    shares = resampling.shares()
    assert shares.shape == (200, 8)
    np.testing.assert_allclose(shares[:, :3].sum(1), 0.5)
    np.testing.assert_allclose(shares[:, 3:].sum(1), 0.5)
    np.testing.assert_allclose(resampling.weights, [1 / 6] * 3 + [1 / 10] * 5)
    values = np.random.default_rng(5).random((8, 2))
    np.testing.assert_allclose(resampling.means(values), shares @ values)
    np.testing.assert_allclose(Resampling([3], draws=200).means(values[:3, 0]), 2 * shares[:, :3] @ values[:3, 0])
    with pytest.raises(ConfigError, match="no problems"):
        Resampling([3, 0])


def test_a_line_is_scipys_and_statsmodels():
    sm = pytest.importorskip("statsmodels.api")
    random = np.random.default_rng(3)
    x = np.sort(random.normal(size=9))
    y = 2.5 * x - 1 + 0.3 * random.normal(size=9)
    line = fit_line(x, y)
    theirs = stats.linregress(x, y)
    assert (line.slope, line.intercept) == pytest.approx((theirs.slope, theirs.intercept))
    assert line.r_squared == pytest.approx(theirs.rvalue**2)
    assert line.slope_error == pytest.approx(theirs.stderr)
    fitted = sm.OLS(y, sm.add_constant(x)).fit()
    assert line.r_squared == pytest.approx(fitted.rsquared)
    interval = line.slope_interval(0.9)
    assert (interval.low, interval.high) == pytest.approx(tuple(fitted.conf_int(alpha=0.1)[1]))
    np.testing.assert_allclose(line.at(x), fitted.predict())
    np.testing.assert_allclose(fit_slopes(np.stack([x, x]), np.stack([y, -y])), [line.slope, -line.slope])


def test_degenerate_lines():
    assert fit_line([0, 1], [1, 3]).r_squared == 1
    assert np.isnan(fit_line([0, 1], [1, 3]).slope_error)
    assert fit_line([0, 1, 2], [5, 5, 5]).r_squared == 1
    for x, y in (([1], [1]), ([1, 1], [0, 2]), ([1, 2], [1])):
        with pytest.raises(ConfigError, match="A line needs"):
            fit_line(x, y)


def test_undefined_replicates_are_left_out():
    interval = percentile_interval(1.0, [np.nan, 0.0, 1.0, 2.0], level=0.5)
    assert (interval.low, interval.high) == (0.5, 1.5)
    assert np.isnan(percentile_interval(1.0, [np.nan]).low)
