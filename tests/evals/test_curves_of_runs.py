"""From recorded samples to scores, curves, tables and figures."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tah2.cli.frame import main
from tah2.config.strict import ConfigError
from tah2.evals import graders
from tah2.evals.curves import slope
from tah2.evals.cutoffs import cut
from tah2.evals.flops import FlopsModel
from tah2.evals.grade_run import GradedRun
from tah2.evals.graders.grader import GRADER_FAILED
from tah2.evals.grades import content_digest
from tah2.evals.manifest import RunManifest
from tah2.evals.records import ERROR, RecordFile, SampleRecord
from tah2.evals.run import evaluate, samples_path
from tah2.evals.run_plan import Sample
from tah2.evals.scaling import default_cutoffs, run_curves, votes
from tah2.evals.scaling_report import ReportConfig, comparable, matched_rows, point_rows, slope_rows, vote_rows
from tah2.evals.score import flops_per_token, per_problem, score
from tah2.evals.task import Grade
from tests.engine.tiny import byte_tokenizer
from tests.evals.toy import asked, save_model, save_problems

PROBLEMS, REPEATS, LIMIT = 5, 4, 96


class Scripted:
    """A model that answers problem i rightly in i of its repeats, the later the problem the longer it thinks."""

    def __init__(self, manifest: RunManifest, flops: FlopsModel) -> None:
        self.flops, self.ceiling = flops, manifest.model["max_depth"]

    def records(self, samples: Iterable[Sample]) -> Iterator[SampleRecord]:
        for sample in samples:
            place = int(sample.problem.id[-1])
            said = 2 * place if sample.repeat < place else 7 if sample.repeat == 3 else 100 + sample.repeat
            text = "." * (10 * (place + 1) + sample.repeat) + f"\\boxed{{{said}}}"
            tokens = byte_tokenizer().encode(text)[:LIMIT]
            depths = [1 + (position * 7 + place) % self.ceiling for position in range(len(tokens))]
            counts = [3, *[1] * (self.ceiling - 1)]
            yield SampleRecord(
                task=sample.task,
                problem=sample.problem.id,
                repeat=sample.repeat,
                seed=sample.seed,
                prompt_tokens=sum(counts),
                prompt_depth_counts=counts,
                token_ids=tokens,
                depths=depths,
                text=text,
                finish_reason="stop",
                decode_flops=int(self.flops.of_beginnings(counts, depths)[-1]),
                seconds=0.01 * sum(depths),
                first_token_seconds=0.01 * depths[0],
            )


class Judge:
    """Stands for a grader: finds the last boxed number, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.version = "1"

    def versions(self, task: Any) -> dict[str, str]:
        return {"judge": self.version}

    def grade_many(self, task: Any, items: Any, workers: int, on_grade: Any) -> None:
        for place, (problem, record) in enumerate(items):
            on_grade(place, self.grade(problem, record))

    def grade(self, problem: Any, record: SampleRecord) -> Grade:
        self.asked += 1
        box, found, rest = record.text.rpartition("\\boxed{")
        if not found or "}" not in rest:
            return Grade(0.0, "no answer", None)
        answer = rest.partition("}")[0]
        right = answer == problem.data["answer"]
        return Grade(float(right), "", answer, {"strict": float(right and len(box) < 45)})


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    made = Judge()
    monkeypatch.setattr(graders, "grade_many", made.grade_many)
    monkeypatch.setattr(graders, "packages_of", made.versions)
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems in `data`, models in `tah2` and `standard`, and a scripted run of each in `run-tah2`, `run-standard`."""
    home = tmp_path_factory.mktemp("place")
    save_problems(home / "data", PROBLEMS)
    for name, loop in (("tah2", {"kind": "tah2", "max_depth": 3}), ("standard", {"kind": "standard", "max_depth": 1})):
        model = save_model(home / name, **loop)
        config = asked(model, home / "data", home / f"run-{name}", n=REPEATS, max_tokens=LIMIT)
        evaluate(dataclasses.replace(config, limit=1, out=home / "facts" / name), _Nothing())
        facts = RunManifest.read(home / "facts" / name)
        flops = FlopsModel(facts.backbone, facts.loop, facts.model["max_depth"])  # type: ignore[arg-type]
        evaluate(config, Scripted(facts, flops))
    return home


class _Nothing:
    def records(self, samples: Iterable[Sample]) -> Iterator[SampleRecord]:
        return iter(())


def opened(place: Path, name: str = "tah2") -> GradedRun:
    run = GradedRun(place / f"run-{name}", place / "data")
    run.grades.path.unlink(missing_ok=True)
    return GradedRun(place / f"run-{name}", place / "data")


def test_scores_are_means_over_problems_of_means_over_responses(place: Path, judge: Judge):
    scores = score(opened(place), draws=500)
    (task,) = scores.tasks
    assert task.accuracy.estimate == pytest.approx(np.mean([0, 0.25, 0.5, 0.75, 1]))
    assert task.accuracy.low < task.accuracy.estimate < task.accuracy.high
    assert (task.metric, task.problems, task.responses, task.missing, task.failed) == ("avg@4", 5, 20, 0, 0)
    records = RecordFile(samples_path(place / "run-tah2", "gsm8k")).read()
    tokens = sum(len(record.token_ids) for record in records)
    assert task.flops_per_token == sum(record.decode_flops or 0 for record in records) / tokens
    assert task.mean_depth == pytest.approx(sum(sum(record.depths) for record in records) / tokens)
    assert 0 < task.parts["strict"] < task.accuracy.estimate
    assert task.graded_with["packages"] == {"judge": "1"}
    assert any("of 1319 problems" in caveat for caveat in task.caveats)


def test_grading_is_repeatable_and_asks_only_for_what_is_new(place: Path, judge: Judge):
    run = opened(place)
    first = score(run, draws=100)
    once = judge.asked
    assert once == 20
    again = GradedRun(place / "run-tah2", place / "data")
    assert score(again, draws=100) == first
    assert judge.asked == once
    content = run.grades.path.read_bytes()
    run.grades.path.write_bytes(content[: len(content) // 2])
    assert score(GradedRun(place / "run-tah2", place / "data"), draws=100) == first
    assert once + 9 <= judge.asked <= once + 11
    judge.version = "2"
    score(GradedRun(place / "run-tah2", place / "data"), workers=3, draws=100)
    assert judge.asked >= 2 * once


def test_a_run_that_is_not_graded_or_read_other_data_is_refused(place: Path, judge: Judge, tmp_path: Path):
    run = opened(place)
    with pytest.raises(ConfigError, match="not graded yet"):
        run.grade_of(run.records("gsm8k")[0])
    with pytest.raises(ConfigError, match="answers other data"):
        GradedRun(place / "run-tah2", save_problems(tmp_path, 6))
    with pytest.raises(ConfigError, match="no samples of 'aime24'"):
        GradedRun(place / "run-tah2", place / "data", ["aime24"])
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        GradedRun(tmp_path)


def test_failed_responses_count_as_wrong_and_missing_ones_are_told(place: Path, judge: Judge, tmp_path: Path):
    records = RecordFile(samples_path(place / "run-tah2", "gsm8k")).read()[:-1]
    records[-1] = dataclasses.replace(records[-1], finish_reason=ERROR, token_ids=[], depths=[], decode_flops=None)
    manifest = RunManifest.read(place / "run-tah2")
    manifest.write(tmp_path)
    with RecordFile(samples_path(tmp_path, "gsm8k")) as file:
        for record in records:
            file.append(record)
    (task,) = score(GradedRun(tmp_path, place / "data"), draws=50).tasks
    assert (task.failed, task.missing) == (1, 1)
    assert task.accuracy.estimate == pytest.approx(np.mean([0, 0.25, 0.5, 0.75, 2 / 3]))
    assert task.flops_per_response is None
    assert task.flops_per_token is not None


def test_a_grader_that_breaks_down_is_asked_again(place: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch):
    def broken(task: Any, items: Any, workers: int, on_grade: Any) -> None:
        for number in range(len(items)):
            on_grade(number, Grade(0.0, f"{GRADER_FAILED}: no module named sympy"))

    run = opened(place)
    monkeypatch.setattr(graders, "grade_many", broken)
    (task,) = score(run, draws=50).tasks
    assert (task.undecided, task.accuracy.estimate) == (20, 0)
    monkeypatch.setattr(graders, "grade_many", judge.grade_many)
    (task,) = score(GradedRun(place / "run-tah2", place / "data"), draws=50).tasks
    assert (task.undecided, task.accuracy.estimate) == (0, 0.5)


def test_responses_are_judged_and_priced_again_at_every_cutoff(place: Path, judge: Judge):
    run = opened(place)
    limits = (1, 20, 35, 50, LIMIT)
    (curve,) = run_curves(run, limits, byte_tokenizer()).tasks
    manifest = run.manifest
    flops = FlopsModel(manifest.backbone, manifest.loop, manifest.model["max_depth"])  # type: ignore[arg-type]
    for column, limit in enumerate(limits):
        text_of = byte_tokenizer().decode
        records = [cut(record, limit, text_of, flops) for record in run.records("gsm8k")]
        right = [judge.grade(problem_of(run, record), record).correct for record in records]
        np.testing.assert_allclose(curve.accuracy[:, column], per_problem(records, right))
        costs = [flops.of(record) or 0 for record in records]
        assert curve.flops is not None
        np.testing.assert_allclose(curve.flops[:, column], per_problem(records, costs))
        assert curve.tokens[column] == np.mean([min(len(record.token_ids), limit) for record in records])
    assert (np.diff(curve.accuracy.mean(0)) >= 0).all()
    assert curve.accuracy[:, 0].max() == 0
    assert curve.flops is not None
    assert curve.flops[:, 0].max() == 0
    assert curve.seconds is not None
    assert (np.diff(curve.seconds.mean(0)) > 0).all()


def problem_of(run: GradedRun, record: SampleRecord) -> Any:
    return next(each for each in run.loaded[record.task].problems if each.id == record.problem)


def test_runs_are_compared_at_matched_compute(place: Path, judge: Judge):
    runs = comparable([run_curves(opened(place, name), (20, 40, 60, LIMIT), byte_tokenizer()) for name in MODELS])
    config = ReportConfig(draws=300, at=(1e6,))
    slopes = {row["run"]: row for row in slope_rows(runs, config)}
    for run in runs:
        curve = run.against_flops()
        assert curve is not None
        assert slopes[run.label]["points_per_doubling"] == pytest.approx(100 * slope(curve, draws=10).line.slope)
    peak_rows = [row for row in matched_rows(runs, config) if row["at"] == "baseline's peak"]
    assert [row["run"] for row in peak_rows] == list(MODELS)
    assert "gain" not in peak_rows[0]
    assert peak_rows[1]["gain"] == pytest.approx(peak_rows[1]["accuracy"] - peak_rows[0]["accuracy"], nan_ok=True)
    points = [row for row in point_rows(runs, config) if row["task"] == "mean"]
    assert len(points) == 8
    assert all(row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] for row in points)


MODELS = ("standard", "tah2")


def test_votes_of_recorded_answers(place: Path, judge: Judge):
    run = run_curves(opened(place), (LIMIT,), byte_tokenizer())
    (curve,) = run.tasks
    exact = votes(curve.ballots)
    assert exact.shape == (PROBLEMS, REPEATS)
    np.testing.assert_allclose(exact[:, 0], curve.accuracy[:, -1])
    np.testing.assert_allclose(votes(curve.ballots, draws=4000), exact, atol=0.04)
    rows = vote_rows([run], ReportConfig(draws=50))
    assert [row["n"] for row in rows] == [1, 2, 3, 4]
    assert curve.flops is not None
    assert rows[3]["flops"] == pytest.approx(4 * curve.flops[:, -1].mean())


def test_runs_without_common_problems_or_names_are_refused(place: Path, judge: Judge):
    run = run_curves(opened(place), (LIMIT,), byte_tokenizer())
    with pytest.raises(ConfigError, match="name them apart"):
        comparable([run, run])
    other = dataclasses.replace(run.tasks[0], problems=("x",))
    with pytest.raises(ConfigError, match="no benchmark in common"):
        comparable([run, dataclasses.replace(run, label="other", tasks=(other,))])
    with pytest.raises(ConfigError, match="--tokenizer"):
        run_curves(opened(place), (3,))


def test_the_grid_is_the_papers_as_far_as_a_run_reaches():
    assert default_cutoffs(32768) == (4096, 6144, 8192, 12288, 16384, 20480, 24576, 28672, 32768)
    assert default_cutoffs(10000) == (4096, 6144, 8192, 10000)
    assert default_cutoffs(256) == (32, 48, 64, 96, 128, 160, 192, 224, 256)
    assert default_cutoffs(1) == (1,)


def test_the_same_content_is_judged_once_whatever_its_length(place: Path):
    record = RecordFile(samples_path(place / "run-tah2", "gsm8k")).read()[0]
    assert content_digest(record) == content_digest(dataclasses.replace(record, repeat=2, seconds=9.0, token_ids=[1]))
    assert content_digest(record) != content_digest(dataclasses.replace(record, text="."))
    assert content_digest(record) != content_digest(dataclasses.replace(record, extra={"turns": [["f()"]]}))
    assert flops_per_token([dataclasses.replace(record, decode_flops=None)]) is None


def test_the_commands_print_tables_and_write_files(
    place: Path, judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    data = ["--data-dir", str(place / "data")]
    for name in MODELS:
        assert main(["grade", str(place / f"run-{name}"), *data]) == 0
    printed = capsys.readouterr().out
    assert "gsm8k" in printed
    assert "50.0" in printed
    assert "judge 1" in printed
    scores = json.loads((place / "run-tah2" / "scores.json").read_text(encoding="utf-8"))
    assert scores["tasks"]["gsm8k"]["accuracy"]["estimate"] == 0.5
    assert scores["settings"]["model"]["loop"]["kind"] == "tah2"
    words = [str(place / f"run-{name}") for name in MODELS]
    words += ["--cutoffs", "20,40,60,96", "--fit-to", "60", "--draws", "200", "--out", str(tmp_path), *data]
    assert main(["curves", *words]) == 0
    printed = capsys.readouterr().out
    assert "accuracy per doubling of decoding FLOPs" in printed
    assert "cons@n" in printed
    for name in ("runs", "points", "slopes", "matched", "votes"):
        rows = list(csv.DictReader((tmp_path / f"{name}.csv").open(encoding="utf-8")))
        assert {row["run"] for row in rows} == set(MODELS), name
    for name in ("accuracy-flops", "accuracy-latency", "votes"):
        for form in ("svg", "pdf", "png"):
            assert (tmp_path / f"{name}.{form}").stat().st_size > 1000
    assert not (tmp_path / "accuracy-flops-by-task.svg").exists()


def test_mistakes_in_the_commands_are_told(place: Path, judge: Judge, capsys: pytest.CaptureFixture[str]):
    run, data = str(place / "run-tah2"), ["--data-dir", str(place / "data")]
    for words, sentence in (
        (["curves", run, "--labels", "a,b"], "'--labels' names 2 runs"),
        (["curves", run, "--cutoffs", "4K"], "must be numbers"),
        (["curves", run, "--cutoffs", "0", *data], "at least one token"),
        (
            ["curves", run, "--baseline", "nobody", "--cutoffs", "96", "--draws", "9", *data],
            "No run is called 'nobody'",
        ),
        (["grade", run, "--workers", "0"], "'--workers' must be at least 1"),
        (["grade", str(place)], "holds no run.json"),
    ):
        assert main(words) == 2, words
        assert sentence in capsys.readouterr().err
