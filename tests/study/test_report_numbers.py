"""Every number of the tables, recomputed from the raw lines by plain loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from tah2.study import numbers
from tah2.study.layout import Results, load_results
from tests.study.synthetic import CUTOFFS, TASKS, VARIANTS, synthetic_study

FEW = tuple(made for made in VARIANTS if made.name in ("standard", "ouro-m2", "tah2-m2"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(synthetic_study(tmp_path_factory.mktemp("study"), FEW, bases=3, seeds=2))


def raw_rows(results: Results, variant: str) -> list[list[dict]]:
    """Grades of each unit, read without any of the package's code."""
    folders = sorted(Path(results.root, "units").glob(f"{variant}-b*"))
    return [[json.loads(line) for line in (folder / "grades.jsonl").open()] for folder in folders]


def plain_accuracy(rows: list[dict], cutoff: int) -> float:
    families = []
    for task in TASKS:
        mine = [row for row in rows if row["task"] == task]
        families.append(mean(1.0 if row["correct"] and row["tokens"] <= cutoff else 0.0 for row in mine))
    return mean(families)


@pytest.mark.parametrize("variant", ["standard", "tah2-m2"])
def test_accuracy_and_compute_at_every_cutoff_are_those_of_the_raw_lines(results: Results, variant: str):
    runs, units = numbers.runs_of(results, variant), raw_rows(results, variant)
    assert len(units) == 6
    for place, cutoff in enumerate(CUTOFFS):
        assert runs.mean_accuracy()[place] == pytest.approx(mean(plain_accuracy(rows, cutoff) for rows in units))
        spent = mean(mean(row["flops_at"][place] for row in rows) for rows in units)
        assert runs.mean_compute()[place] == pytest.approx(spent)
    assert runs.by_unit()[:, -1] == pytest.approx([plain_accuracy(rows, CUTOFFS[-1]) for rows in units])


def test_costs_per_token_are_totals_over_totals(results: Results):
    units = raw_rows(results, "tah2-m2")
    each = [sum(row["flops"] for row in rows) / sum(row["tokens"] for row in rows) for rows in units]
    assert numbers.flops_per_token(results.of("tah2-m2")) == pytest.approx(mean(each))
    deep = [sum(row["depth"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows) for rows in units]
    assert numbers.mean_depth(results.of("tah2-m2")) == pytest.approx(mean(deep))


def test_slope_is_the_least_squares_line_on_log2_of_compute(results: Results):
    runs = numbers.runs_of(results, "standard")
    fitted = np.polyfit(np.log2(runs.mean_compute()), runs.mean_accuracy(), 1)[0]
    found = numbers.slope(runs)
    assert found.line.slope == pytest.approx(fitted)
    assert found.interval.low < fitted < found.interval.high


def test_slopes_may_leave_the_longest_cutoffs_out(results: Results):
    runs = replace(numbers.runs_of(results, "standard"), fitted=4)
    fitted = np.polyfit(np.log2(runs.mean_compute()[:4]), runs.mean_accuracy()[:4], 1)[0]
    found = numbers.slope(runs)
    assert (found.line.slope, found.line.points) == (pytest.approx(fitted), 4)
    assert found.interval.low < fitted < found.interval.high
    assert results.fitted is None
    results.study["generate"]["fit_to"] = CUTOFFS[3]
    assert results.fitted == numbers.runs_of(results, "standard").fitted == 4
    del results.study["generate"]["fit_to"]


def test_gain_over_itself_is_nothing_and_draws_are_paired(results: Results):
    runs, again = numbers.runs_of(results, "standard"), numbers.runs_of(results, "standard")
    nothing = numbers.gain(runs, again)
    assert (nothing.estimate, nothing.low, nothing.high) == (0.0, 0.0, 0.0)
    better = numbers.gain(numbers.runs_of(results, "tah2-m2"), runs)
    assert 0 < better.low < better.estimate < better.high


@pytest.mark.parametrize("bases", [2, 3, 6])
def test_draws_vary_between_bases_as_a_standard_error_says(bases: int):
    """Every problem alike, so that models alone differ; plain draws would be narrower by sqrt((n - 1) / n)."""
    values = np.array([0.3, 0.5, 0.6, 0.4, 0.35, 0.8])[:bases]
    table = np.broadcast_to(values[:, None, None], (bases, 4, 1)).copy()
    runs = numbers.Runs(table, table, (4,), tuple((base, 0) for base in range(bases)))
    drawn = runs.draws[0][:, 0]
    assert drawn.mean() == pytest.approx(values.mean(), abs=0.01)
    assert drawn.std() == pytest.approx(values.std(ddof=1) / np.sqrt(bases), rel=0.06)


def test_a_difference_of_slopes_is_of_pairs(results: Results):
    runs, baseline = numbers.runs_of(results, "tah2-m2"), numbers.runs_of(results, "standard")
    same = numbers.slope_difference(runs, runs)
    assert (same.estimate, same.low, same.high) == (0.0, 0.0, 0.0)
    found = numbers.slope_difference(runs, baseline)
    slopes = [np.polyfit(np.log2(one.mean_compute()), one.mean_accuracy(), 1)[0] for one in (runs, baseline)]
    assert found.estimate == pytest.approx(slopes[0] - slopes[1])


def test_matched_compute_interpolates_between_cutoffs_and_keeps_what_a_finished_model_said(results: Results):
    runs, baseline = numbers.runs_of(results, "tah2-m2"), numbers.runs_of(results, "standard")
    found = numbers.matched(runs, baseline)
    assert found is not None
    assert found.flops == pytest.approx(baseline.mean_compute()[np.argmax(baseline.mean_accuracy())])
    x, y = np.log2(runs.mean_compute()), runs.mean_accuracy()
    assert found.accuracy == pytest.approx(np.interp(np.log2(found.flops), x, y))
    own = numbers.matched(runs, baseline, own=True)
    assert own is not None
    assert own.flops == pytest.approx(runs.mean_compute()[-1])
    assert own.baseline == pytest.approx(baseline.mean_accuracy()[-1])
    assert own.gain.estimate == pytest.approx(own.accuracy - own.baseline)


def test_votes_start_at_the_mean_accuracy_and_cost_n_responses(results: Results):
    units = results.of("tah2-m2")
    found = numbers.votes(units)
    assert found is not None
    answered = [
        mean(mean(row.correct and bool(row.answer) for row in unit.grades if row.task == task) for task in TASKS)
        for unit in units
    ]
    assert found.accuracy[0] == pytest.approx(mean(answered))
    assert found.compute == pytest.approx(found.compute[0] * np.arange(1, len(found.compute) + 1))
