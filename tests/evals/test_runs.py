"""Runs survive their process, refuse other settings, and say what a response would have been at any limit."""

from __future__ import annotations

import dataclasses
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tah2.cli.frame import main
from tah2.config.strict import ConfigError
from tah2.engine.detokenize import Detokenizer
from tah2.evals.cutoffs import cut, seconds_until
from tah2.evals.flops import FlopsModel
from tah2.evals.manifest import RunManifest, differences
from tah2.evals.records import ERROR, RecordFile, SampleRecord, same_samples
from tah2.evals.run import evaluate, locked, samples_path
from tah2.evals.run_plan import EvalConfig, Prompts, Sample, response_text
from tests.engine.tiny import byte_tokenizer
from tests.evals.toy import asked, save_model, save_problems


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_problems(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    evaluate(asked(model, data, out))
    return out


def records(out: Path) -> list[SampleRecord]:
    return RecordFile(samples_path(out, "gsm8k")).read()


def test_every_sample_has_one_record_that_accounts_for_itself(whole: Path):
    found = records(whole)
    assert [record.key for record in found] == [(f"gsm8k-{i}", repeat) for i in range(4) for repeat in range(3)]
    assert len({record.seed for record in found}) == 12
    assert len({tuple(record.token_ids) for record in found}) > 6
    manifest = RunManifest.read(whole)
    flops = FlopsModel(manifest.backbone, manifest.loop, manifest.model["max_depth"])  # type: ignore[arg-type]
    for record in found:
        assert len(record.depths) == len(record.token_ids) <= 12
        assert sum(record.prompt_depth_counts) == record.prompt_tokens
        assert record.finish_reason == ("length" if len(record.token_ids) == 12 else "stop")
        assert record.decode_flops == flops.of(record)
        assert record.seconds is not None
        assert record.seconds >= (record.first_token_seconds or 0) > 0
    assert {depth for record in found for depth in record.depths} == {1, 2, 3}


def test_a_run_cut_at_random_points_and_resumed_equals_an_uninterrupted_one(
    model: Path, data: Path, whole: Path, tmp_path: Path
):
    chance = random.Random(3)
    evaluate(asked(model, data, tmp_path))
    path = samples_path(tmp_path, "gsm8k")
    for _ in range(4):
        content = path.read_bytes()
        path.write_bytes(content[: chance.randrange(len(content))])
        summary = evaluate(asked(model, data, tmp_path))
        assert summary.generated > 0
        assert same_samples(records(tmp_path), records(whole))
    assert evaluate(asked(model, data, tmp_path)).generated == 0


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_goes_on(model: Path, data: Path, tmp_path: Path):
    words = ["eval", str(model), "--tasks", "gsm8k", "--n", "10", "--max-tokens", "60", "--data-dir", str(data)]
    words += ["--batch", "3", "--device", "cpu", "--kv-memory-gib", "0.05", "--out"]
    process = subprocess.Popen([sys.executable, "-m", "tah2", *words, str(tmp_path / "killed")])
    path = samples_path(tmp_path / "killed", "gsm8k")
    deadline = time.monotonic() + 500
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 4:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed = len(list(RecordFile(path)))
    assert 4 <= killed < 40
    assert main([*words, str(tmp_path / "killed")]) == 0
    assert main([*words, str(tmp_path / "never-killed")]) == 0
    mine, theirs = records(tmp_path / "killed"), records(tmp_path / "never-killed")
    assert len(theirs) == 40
    assert same_samples(mine, theirs)


def test_batching_does_not_change_records(model: Path, data: Path, whole: Path, tmp_path: Path):
    config = asked(model, data, tmp_path)
    evaluate(dataclasses.replace(config, engine=config.engine | {"max_num_seqs": 1, "wavefront_rows": 0}))
    assert same_samples(records(tmp_path), records(whole))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.7}, r"tasks\.gsm8k\.decoding\.temperature is 0\.6 there, but 0\.7 is asked for"),
        ({"n": 4}, r"tasks\.gsm8k\.n is 3 there, but 4"),
        ({"limit": 2}, r"tasks\.gsm8k\.problems\.count is 4 there, but 2"),
        ({"max_depth": 2}, r"model\.max_depth is 3 there, but 2"),
        ({"exit_threshold": 0.4}, r"model\.exit_threshold is 0\.5 there, but 0\.4"),
        ({"seed": 1}, "seed is 0 there, but 1"),
        ({"chat": "off"}, r"prompt\.chat is true there, but false"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    model: Path, data: Path, whole: Path, changes: dict[str, Any], named: str
):
    before = (whole / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=named):
        evaluate(asked(model, data, whole, **changes))
    assert (whole / "run.json").read_bytes() == before


def test_another_model_and_other_problems_are_refused(model: Path, data: Path, whole: Path, tmp_path: Path):
    other = save_model(tmp_path / "other", seed=6)
    with pytest.raises(ConfigError, match=r"model\.weights is"):
        evaluate(asked(other, data, whole))
    with pytest.raises(ConfigError, match="sha256"):
        evaluate(asked(model, save_problems(tmp_path / "more", 5), whole, limit=4))


def test_further_tasks_may_join_a_run(model: Path, data: Path, tmp_path: Path):
    rows = (data / "gsm8k.jsonl").read_text(encoding="utf-8")
    for name in ("gsm8k", "aime24"):
        (tmp_path / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    out = tmp_path / "out"
    evaluate(asked(model, tmp_path, out))
    summary = evaluate(asked(model, tmp_path, out, tasks=("aime24", "gsm8k")))
    assert (summary.total, summary.generated) == (24, 12)
    assert set(RunManifest.read(out).tasks) == {"aime24", "gsm8k"}
    seeds = {record.seed for name in ("gsm8k", "aime24") for record in RecordFile(samples_path(out, name))}
    assert len(seeds) == 24


def test_two_processes_cannot_write_one_run(model: Path, data: Path, tmp_path: Path):
    with locked(tmp_path), pytest.raises(ConfigError, match="Another process"):
        evaluate(asked(model, data, tmp_path))


@pytest.mark.parametrize("limit", [1, 2, 5, 11, 12])
def test_a_cut_record_is_the_record_of_a_run_at_that_limit(
    model: Path, data: Path, whole: Path, tmp_path: Path, limit: int
):
    evaluate(asked(model, data, tmp_path, max_tokens=limit))
    manifest = RunManifest.read(whole)
    flops = FlopsModel(manifest.backbone, manifest.loop, manifest.model["max_depth"])  # type: ignore[arg-type]
    tokenizer = byte_tokenizer()
    shortened = [cut(record, limit, lambda ids: response_text(tokenizer, ids), flops) for record in records(whole)]
    assert same_samples(shortened, records(tmp_path))


@pytest.mark.parametrize("kind", ["standard", "tah2-fixed", "ouro", "ouro-adaptive", "huginn"])
def test_cutoffs_hold_for_every_loop(data: Path, tmp_path: Path, kind: str):
    model = save_model(tmp_path / "model", kind=kind, max_depth=3, exit_threshold=0.25)
    for limit in (9, 4):
        evaluate(asked(model, data, tmp_path / str(limit), n=1, max_tokens=limit))
    manifest = RunManifest.read(tmp_path / "9")
    flops = FlopsModel(manifest.backbone, manifest.loop, manifest.model["max_depth"])  # type: ignore[arg-type]
    tokenizer = byte_tokenizer()
    shortened = [cut(each, 4, lambda ids: response_text(tokenizer, ids), flops) for each in records(tmp_path / "9")]
    assert same_samples(shortened, records(tmp_path / "4"))
    assert all(flops.of(each) == each.decode_flops for each in records(tmp_path / "9"))


def test_a_lower_ceiling_is_another_run(model: Path, data: Path, whole: Path, tmp_path: Path):
    evaluate(asked(model, data, tmp_path, max_depth=1))
    evaluate(asked(model, data, tmp_path / "deeper", max_depth=5))
    assert {depth for record in records(tmp_path) for depth in record.depths} == {1}
    assert max(depth for record in records(tmp_path / "deeper") for depth in record.depths) == 5
    assert RunManifest.read(tmp_path / "deeper").model["max_depth"] == 5


def test_plain_prompts_end_at_stop_strings_as_the_engine_does(model: Path, data: Path, tmp_path: Path):
    evaluate(asked(model, data, tmp_path, chat="off", max_tokens=40))
    tokenizer = byte_tokenizer()
    for record in records(tmp_path):
        detokenizer = Detokenizer(tokenizer, [], ["\nProblem:", "\nQuestion:"])
        for token in record.token_ids:
            if token != 256:
                detokenizer.add(token)
        detokenizer.end()
        assert record.text == detokenizer.text


def test_greedy_runs_take_one_sample(model: Path, data: Path, tmp_path: Path):
    assert evaluate(asked(model, data, tmp_path, temperature=0.0)).total == 4


class Moody:
    """A backend that fails as told."""

    def __init__(self, failing: set[str]) -> None:
        self.failing, self.seen = failing, 0

    def records(self, samples: Iterable[Sample]) -> Iterator[SampleRecord]:
        for sample in samples:
            self.seen += 1
            fails = sample.problem.id in self.failing
            yield SampleRecord(
                task=sample.task,
                problem=sample.problem.id,
                repeat=sample.repeat,
                seed=sample.seed,
                prompt_tokens=1,
                prompt_depth_counts=[1],
                token_ids=[65],
                depths=[1],
                text="A",
                finish_reason=ERROR if fails else "stop",
                extra={"error": "the prompt is too long"} if fails else {},
            )


def test_failed_samples_are_tried_again_and_a_hopeless_run_gives_up(model: Path, data: Path, tmp_path: Path):
    config = asked(model, data, tmp_path)
    assert evaluate(config, Moody({"gsm8k-1"})).failed == 3
    again = evaluate(config, Moody(set()))
    assert (again.generated, again.failed) == (3, 0)
    with pytest.raises(ConfigError, match="Every sample fails: the prompt is too long"):
        evaluate(dataclasses.replace(config, out=tmp_path / "none"), Moody({f"gsm8k-{i}" for i in range(4)}))


def test_time_until_a_token_is_spread_over_passes():
    made = SampleRecord(
        *("t", "p", 0, 0, 1, [1], [1, 2, 3], [1, 1, 3], "", "stop"), seconds=5.0, first_token_seconds=1.0
    )
    assert seconds_until(made, 1) == 1.0
    assert seconds_until(made, 2) == 2.0
    assert seconds_until(made, 3) == seconds_until(made, 9) == 5.0


def test_differences_are_named():
    assert differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": 3}) == [
        "a.b is 1 there, but 2 is asked for",
        "c is null there, but 3 is asked for",
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": ()}, "at least one task"),
        ({"tasks": ("gsm8k", "gsm8k")}, "named twice"),
        ({"model": None}, "Name a model"),
        ({"n": 0}, "n must be at least 1"),
        ({"endpoint": "http://x", "workers": 2}, "asked from one process"),
    ],
)
def test_mistakes_are_told_in_one_sentence(changes: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        EvalConfig(**{"out": Path("x"), "tasks": ("gsm8k",), "model": "m", **changes})


def test_a_model_that_is_none_is_told(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["eval", str(tmp_path / "nothing"), "--tasks", "gsm8k", "--data-dir", str(data), "--out"]
    assert main([*words, str(tmp_path / "out")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--tasks", "gsm", "--out", str(tmp_path / "out")]) == 2
    assert "did you mean 'gsm8k'?" in capsys.readouterr().err


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "--tasks", "help"]) == 0
    assert "avg@32" in capsys.readouterr().out


def test_a_tokenizer_without_a_template_is_prompted_with_text():
    tokenizer = byte_tokenizer()
    assert not Prompts(tokenizer, "auto", {}).chat
    with pytest.raises(ConfigError, match="no chat template"):
        Prompts(tokenizer, "on", {})
    with pytest.raises(ConfigError, match="no tokenizer"):
        Prompts(None, "auto", {})


def test_the_pages_python_runs():
    page = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["curve"].mean_accuracy().tolist() == [0.0, 0.25, 0.75]


def test_the_page_names_every_option_of_a_run():
    from tah2.cli.eval import parser

    page = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    options = {name for action in parser()._actions for name in action.option_strings if name.startswith("--")}
    told = {"--help", "--label", "--max-model-len", "--chat-template-kwargs"}
    assert {name for name in options - told if name not in page} == set()
