"""A miniature study, carried out: what it leaves behind, what it does not do twice, and what a kill does to it."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from tah2.compute import decode_flops
from tah2.config.strict import ConfigError, build
from tah2.data.config import DataConfig
from tah2.data.procedural import ProceduralConfig
from tah2.study.analyses.stage import subject_of
from tah2.study.layout import SUMMARY, Results, UnitResult, load_results
from tah2.study.ledger import Ledger
from tah2.study.plan import plan_study
from tah2.study.report.sections.account import all_runs
from tah2.study.report.view import open_view
from tah2.study.runner import begin_study, run_study, state_of
from tah2.study.shop import NotReady, Shop, contents, essential
from tah2.study.stages.respond import _begin, flops_model
from tah2.study.summary import summarise
from tests.study.mini import mini
from tests.study.watching import SMALL, UNITS, Remembered, run_and_die


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The miniature, carried out once; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("done")
    screen = Remembered()
    shop = run_study(plan_study(mini(folder)), folder / "out", screen, stages=(*UNITS, "runtime"))
    assert screen.cached == []
    return shop


@pytest.fixture(scope="module")
def results(done: Shop) -> Results:
    return load_results(done.root)


def tables(root: Path) -> dict[str, Any]:
    """The summary without what depends on the clock."""
    summary = summarise(load_results(root))
    for row in summary["variants"]:
        del row["training_seconds"]
    return summary


def test_every_unit_leaves_its_results(results: Results):
    assert len(results.units) == 8
    assert len(results.all_units) == 10
    for unit in results.units:
        assert unit.validation["loss"] > 0
        assert [record["step"] for record in unit.curve] == [2, 4]
        assert len(unit.records()) == len(unit.grades) == 5 * 2
        assert (unit.model_path / "model.safetensors").is_file()
        assert not (unit.folder / "train" / "checkpoints").exists()
        assert unit.training["steps"] == 4
    assert results.cutoffs == (4, 8, 12)
    assert results.tasks == ("stop-chase",)


def test_another_ceiling_is_the_same_model(results: Results):
    (deeper,), (trained, _) = results.of("tah2-at-3"), results.of("tah2-m2")
    assert deeper.model_path == trained.model_path
    assert (deeper.info.max_depth, deeper.info.ceiling, deeper.info.of) == (2, 3, "tah2-m2-b0-s0")
    assert max(depth for record in deeper.records() for depth in record.depths) == 3
    assert max(depth for record in trained.records() for depth in record.depths) == 2


def test_a_second_stage_starts_from_the_first_ones_model(results: Results):
    from safetensors.torch import load_file

    (gate,), (first, _) = results.of("ouro-gate"), results.of("ouro-m2")
    mine, its = (load_file(unit.model_path / "model.safetensors") for unit in (gate, first))
    assert set(its) < set(mine)
    assert all(mine[name].equal(its[name]) for name in its)


def test_the_search_takes_the_rate_of_the_lowest_loss(results: Results):
    searched = {u.info.learning_rate: u.validation["loss"] for u in results.all_units if u.info.group == "search"}
    best = min(searched, key=lambda rate: searched[rate])
    for variant in ("standard", "ouro-m2"):
        assert {unit.info.learning_rate for unit in results.of(variant)} == {best}
    assert results.of("tah2-m2")[0].info.learning_rate == 1e-2


def test_a_rate_at_which_training_diverges_loses_the_search(tmp_path: Path):
    change = {"search": {"learning_rates": [1e-2, 1e30]}, "bases": {"tiny": {"seeds": [0]}}}
    plan = plan_study(mini(tmp_path, change), ["standard"])
    shop = run_study(plan, tmp_path / "out", Remembered(), stages=("base", "train", "validate"))
    found = load_results(shop.root)
    (unit,) = found.units
    assert unit.info.learning_rate == 1e-2
    assert {run.info.learning_rate: run.validation["loss"] for run in found.all_units if run is not unit}[1e30] is None
    screen = Remembered()
    run_study(plan, tmp_path / "out", screen, stages=("base", "train", "validate"))
    assert screen.ran == []
    all_runs(open_view(shop.root)).html()
    hopeless = plan_study(mini(tmp_path, change, {"search": {"learning_rates": [1e30]}}), ["standard"])
    with pytest.raises(ConfigError, match="every run of its search diverged"):
        run_study(hopeless, tmp_path / "out", Remembered(), stages=("base", "train", "validate"))


def test_grades_are_what_the_raw_records_say(done: Shop, results: Results):
    """Accuracy by the task's own verifier, FLOPs by the accounting, one token of the response after the other."""
    for unit in results.units:
        flops = flops_model(done, done.plan.units[unit.info.id])
        task = build(ProceduralConfig, unit.info.recipe["procedural"]).build_task()
        problems = {p.id: p for p in done_problems(done, unit.info.id)}
        records = {record.key: record for record in unit.records()}
        for row in unit.grades:
            record = records[row.problem, row.repeat]
            trace = task.verify(problems[row.problem].prompt, record.token_ids)
            assert row.correct == (trace.answer and record.finish_reason == "stop")
            prompt = [m for m, count in enumerate(record.prompt_depth_counts, 1) for _ in range(count)]
            for cutoff, spent in zip(results.cutoffs, row.flops_at, strict=True):
                decoded = record.depths[1:cutoff]
                assert spent == decode_flops(flops.backbone, flops.loop, prompt, decoded, unit.info.ceiling)
            assert row.flops == row.flops_at[-1] == record.decode_flops
            assert row.depth == pytest.approx(sum(record.depths) / len(record.depths))


def done_problems(done: Shop, unit: str) -> list[Any]:
    from tah2.study.stages.respond import world_of

    asked = done.plan.study.generate
    return world_of(done.plan.units[unit]).problems(asked.problems, asked.seed)


def test_the_summary_is_what_the_issue_of_machines_expects(done: Shop):
    summary = summarise(load_results(done.root))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    wanted = {"name", "loop", "max_depth", "seeds", "validation_loss", "accuracy", "accuracy_interval"}
    wanted |= {"flops_per_token", "mean_depth", "slope"}
    assert [row["name"] for row in summary["variants"]] == [
        "standard",
        "ouro-m2",
        "ouro-gate",
        "tah2-m2",
        "tah2-at-3",
    ]
    for row in summary["variants"]:
        assert wanted <= row.keys()
    assert all({"name", "against", "gain", "interval"} <= row.keys() for row in summary["matched_compute"])
    assert all(row.keys() == {"claim", "paper", "ours", "holds"} for row in summary["claims"])
    assert all(isinstance(row["holds"], bool) for row in summary["claims"])


def test_runtime_stands_side_by_side(results: Results):
    assert [(row["variant"], row["batch"]) for row in results.runtime] == [
        ("standard", 1),
        ("tah2-m2", 1),
        ("standard", 2),
        ("tah2-m2", 2),
    ]
    assert all(row["latency_seconds"] > 0 and row["tokens_per_second"] > 0 for row in results.runtime)
    for row in results.runtime:
        assert len(row["latency_rounds"]) == 2
        assert mean(row["latency_rounds"]) == pytest.approx(row["latency_seconds"])


def test_what_is_done_is_not_done_again(done: Shop):
    screen = Remembered()
    run_study(done.plan, done.root, screen, stages=(*UNITS, "runtime"))
    assert screen.ran == []
    assert len(screen.cached) == sum(task.stage in (*UNITS, "runtime") for task in done.plan.tasks.values())


def test_a_moved_study_is_still_done(done: Shop, tmp_path: Path):
    shutil.copytree(done.root, tmp_path / "moved")
    screen = Remembered()
    run_study(done.plan, tmp_path / "moved", screen, stages=UNITS)
    assert screen.ran == []


def test_a_change_runs_again_what_it_changes_and_nothing_else(done: Shop, tmp_path: Path):
    root = tmp_path / "out"
    shutil.copytree(done.root, root)
    before = tables(root)
    change = {"variants": {"tah2-m2": {"base_seeds": [0], "recipe": {"budget": {"steps": 3}}}}}
    screen = Remembered()
    run_study(plan_study(mini(tmp_path, change)), root, screen, stages=UNITS)
    assert {name.partition(":")[2] for name in screen.ran} == {"tah2-m2-b0-s0", "tah2-at-3-b0-s0"}
    assert len(screen.ran) == 4 + 3
    after = tables(root)
    assert after["variants"][0] == before["variants"][0]
    assert after["variants"][3] != before["variants"][3]


def test_new_cutoffs_ask_for_new_grades_alone(done: Shop, tmp_path: Path):
    root = tmp_path / "out"
    shutil.copytree(done.root, root)
    screen = Remembered()
    change = {"generate": {"cutoffs": [6], "fit_to": 12}}
    run_study(plan_study(mini(tmp_path, change)), root, screen, stages=UNITS)
    assert {name.partition(":")[0] for name in screen.ran} == {"grade"}
    assert load_results(root).cutoffs == (6, 12)


def test_a_verdict_is_of_one_ceiling_even_where_responses_are_the_same(done: Shop):
    """The records do not say under which ceiling they were made, and the decider's calls depend on it."""
    name = "tah2-at-3-b0-s0"
    units = {**done.plan.units, name: replace(done.plan.units[name], ceiling=4)}
    other = replace(done, plan=replace(done.plan, units=units))
    task = done.plan.tasks[f"grade:{name}"]
    assert done.inputs(task)["records"] == other.inputs(task)["records"]
    assert done.key(task) != other.key(task)


def test_precision_and_the_content_of_data_decide_a_training(done: Shop, tmp_path: Path):
    config = done.config(done.plan.units["standard-b0-s0"])
    rounded = replace(config, system=replace(config.system, precision="bf16"))
    threaded = replace(config, system=replace(config.system, threads=2), out=tmp_path)
    assert essential(rounded) != essential(config) == essential(threaded)
    file = tmp_path / "chats.jsonl"
    reading = replace(config, procedural=None, data=build(DataConfig, {"sources": [{"path": str(tmp_path)}]}))
    with pytest.raises(NotReady, match="no data files"):
        contents(reading)
    file.write_text('{"prompt": "1", "response": "2"}\n', encoding="utf-8")
    before = contents(reading)
    assert contents(reading) == before
    file.write_text('{"prompt": "1", "response": "23"}\n', encoding="utf-8")
    assert contents(reading) != before
    assert contents(config) == []


def test_responses_to_other_questions_go(tmp_path: Path):
    """Of benchmarks too: `tah2 eval` goes on in the folder that it finds."""
    kept = [tmp_path / "samples" / "chase.jsonl", tmp_path / "eval" / "run.json"]
    _begin(tmp_path, "key")
    for path in kept:
        path.parent.mkdir()
        path.write_text("{}\n", encoding="utf-8")
    _begin(tmp_path, "key")
    assert all(path.is_file() for path in kept)
    _begin(tmp_path, "another")
    assert not any(path.exists() for path in kept)


def test_analyses_of_all_seeds_see_the_same_documents(results: Results):
    unit = results.of("tah2-m2")[0]
    recipe = {**unit.info.recipe, "procedural": {**unit.info.recipe["procedural"], "seed": 7}}
    other = UnitResult(results.root, replace(unit.info, recipe=recipe))
    mine, its = (subject_of(one, 3, results.study["validate"]["seed"]).store for one in (unit, other))
    assert (mine.ids == its.ids).all()
    assert not np.array_equal(subject_of(unit, 3, 7).store.ids, mine.ids)


def test_a_stage_without_its_inputs_says_what_to_run(tmp_path: Path):
    plan = plan_study(mini(tmp_path))
    with pytest.raises(ConfigError, match="base:tiny-b0 has not run"):
        run_study(plan, tmp_path / "out", Remembered(), stages=["train"])
    shop = Shop(tmp_path / "out", plan)
    begin_study(shop)
    assert state_of(shop, plan.tasks["base:tiny-b0"]) == "to do"
    assert state_of(shop, plan.tasks["train:standard-b0-s0"]) == "waits"


def test_markers_of_killed_stages_do_not_exist(done: Shop, tmp_path: Path):
    ledger = Ledger(tmp_path)
    task = done.plan.tasks["train:standard-b0-s0"]
    assert ledger.entry(task) is None
    assert not ledger.is_done(task, "key")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tables of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("small")
    run_study(plan_study(mini(folder, SMALL)), folder / "out", Remembered(), stages=UNITS)
    return tables(folder / "out")


@pytest.mark.slow
def test_a_study_killed_in_every_stage_ends_with_the_same_tables(small: dict[str, Any], tmp_path: Path):
    spawn = multiprocessing.get_context("spawn")
    for stage in ("train", "generate", "grade"):
        process = spawn.Process(target=run_and_die, args=(tmp_path, stage))
        process.start()
        process.join(600)
        assert process.exitcode == -signal.SIGKILL, stage
    screen = Remembered()
    run_study(plan_study(mini(tmp_path, SMALL)), tmp_path / "out", screen, stages=UNITS)
    assert screen.ran[0] == "grade:standard-b0-s0"
    assert tables(tmp_path / "out") == small


@pytest.mark.slow
def test_a_pool_of_processes_gives_the_same_tables(small: dict[str, Any], tmp_path: Path):
    screen = Remembered()
    run_study(plan_study(mini(tmp_path, SMALL)), tmp_path / "out", screen, jobs=2)
    assert screen.ran[-3:] == ["runtime", "analyse", "report"]
    mine = tables(tmp_path / "out")
    known = {row["claim"] for row in small["claims"]}
    assert {**mine, "claims": [row for row in mine["claims"] if row["claim"] in known]} == small
    assert len(mine["claims"]) > len(known)  # those about single tokens, which come from the analyses
    assert json.loads((tmp_path / "out" / SUMMARY).read_text())["claims"] == mine["claims"]


def test_a_half_written_summary_is_never_read(tmp_path: Path):
    (tmp_path / f"{SUMMARY}.partial").write_text('{"variants": [', encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no study"):
        load_results(tmp_path)
