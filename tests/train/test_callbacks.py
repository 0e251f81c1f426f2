"""Listeners hear what happens; none of them can stop a run, and a resumed log holds every step once."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from tah2.config.strict import ConfigError
from tah2.train.callbacks import Callback, Callbacks, RunInfo, make_callbacks
from tah2.train.callbacks.base import Level
from tah2.train.callbacks.jsonl import JsonlLog, read_records
from tah2.train.callbacks.progress import ProgressBar, describe, duration, short
from tah2.train.callbacks.table import check_loggers
from tah2.train.callbacks.tensorboard import TensorBoardLog
from tah2.train.callbacks.wandb import WandbLog

METRICS = {"loss/prediction": 1.5, "depth/mean": 1.25, "depth/1/share": 1.0, "depth/2/share": 0.25}


class Recorder(Callback):
    shows_messages = True

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heard.append(("step", step))

    def on_message(self, level: Level, text: str) -> None:
        self.heard.append((level, text))


class Unreachable(Callback):
    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("no route\nto host")


def test_a_failing_listener_is_reported_once_and_switched_off():
    broken, recorder = Unreachable(), Recorder()
    callbacks = Callbacks([broken, recorder])
    for step in (1, 2, 3):
        callbacks.on_step(step, METRICS)
    assert broken.calls == 1
    assert [entry for entry in recorder.heard if entry[0] == "step"] == [("step", 1), ("step", 2), ("step", 3)]
    ((_, text),) = [entry for entry in recorder.heard if entry[0] == "warning"]
    assert text.startswith("Unreachable failed in on_step (ConnectionError: no route to host)")


def test_messages_reach_people_even_without_a_listener_that_shows_them(capsys: pytest.CaptureFixture[str]):
    Callbacks([Unreachable()]).on_step(1, METRICS)
    assert "warning: Unreachable failed" in capsys.readouterr().err
    Callbacks([Recorder()]).on_message("warning", "seen elsewhere")
    assert capsys.readouterr().err == ""


def test_listeners_that_fail_while_hearing_of_a_failure_do_no_harm(capsys: pytest.CaptureFixture[str]):
    class Deaf(Unreachable):
        shows_messages = True

        def on_message(self, level: Level, text: str) -> None:
            raise OSError("no ears")

    callbacks = Callbacks([Unreachable(), Deaf()])
    callbacks.on_message("info", "hello")
    callbacks.on_step(1, METRICS)
    assert callbacks.active == []
    assert "Deaf failed in on_message" in capsys.readouterr().err


def test_an_impossible_request_ends_the_run_at_its_start(tmp_path: Path):
    class Misconfigured(Callback):
        def on_start(self, run: RunInfo) -> None:
            raise ConfigError("No such project.")

    with pytest.raises(ConfigError, match="No such project"):
        Callbacks([Misconfigured()]).on_start(RunInfo(tmp_path, "run"))


def test_interrupts_pass_through():
    class Interrupted(Callback):
        def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Callbacks([Interrupted()]).on_step(1, METRICS)


def run_log(folder: Path, start: int, stop: int, *, end: bool = True) -> None:
    """Steps start+1 .. stop with a validation every second step."""
    log = JsonlLog()
    log.on_start(RunInfo(folder, "run", start))
    for step in range(start + 1, stop + 1):
        log.on_step(step, {"loss": float(step)})
        if step % 2 == 0:
            log.on_validation(step, {"loss": -float(step)})
    if end:
        log.on_end({"status": "finished"})


def curve(folder: Path, kind: str = "step") -> list[tuple[int, float]]:
    records = read_records(folder / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == kind]


def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path: Path):
    run_log(tmp_path / "whole", 0, 8)
    run_log(tmp_path / "broken", 0, 7, end=False)
    run_log(tmp_path / "broken", 4, 8)
    for kind in ("step", "validation"):
        assert curve(tmp_path / "broken", kind) == curve(tmp_path / "whole", kind)
    assert [record["kind"] for record in read_records(tmp_path / "broken" / "metrics.jsonl")].count("end") == 1


def test_a_torn_last_line_is_dropped(tmp_path: Path):
    run_log(tmp_path, 0, 4, end=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 5, "lo')
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 3, 4]
    run_log(tmp_path, 4, 6)
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_broken_line_in_the_middle_is_pointed_at(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\nnonsense\n{"kind": "step", "step": 2}\n')
    with pytest.raises(ConfigError, match=r"Line 2 of .*metrics\.jsonl is not a JSON record"):
        list(read_records(path))


def test_a_new_run_starts_a_new_log(tmp_path: Path):
    run_log(tmp_path, 0, 5)
    run_log(tmp_path, 0, 2)
    assert [step for step, _ in curve(tmp_path)] == [1, 2]


def test_every_record_is_on_disk_at_once_and_strict_json(tmp_path: Path):
    log = JsonlLog()
    log.on_start(RunInfo(tmp_path, "run"))
    log.on_step(3, {"loss": float("nan"), "optim/grad_norm": float("inf"), "loss/prediction": 2.0})
    log.on_message("warning", "odd")
    log.on_checkpoint(3, tmp_path / "step-3")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    _, step, message, checkpoint = (json.loads(line, parse_constant=refuse) for line in lines)
    assert (step["loss"], step["optim/grad_norm"], step["loss/prediction"]) == (None, None, 2.0)
    assert (message["step"], message["text"]) == (3, "odd")
    assert checkpoint["path"].endswith("step-3")


def tensorboard_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_shows_a_resumed_curve_once(tmp_path: Path):
    for start, stop in ((0, 4), (2, 5)):
        log = TensorBoardLog()
        log.on_start(RunInfo(tmp_path, "run", start))
        for step in range(start + 1, stop + 1):
            log.on_step(step, {"loss": float(step)})
        log.on_validation(stop, {"loss": 0.5})
        log.on_end({})
    assert tensorboard_scalars(tmp_path, "train/loss") == [(step, float(step)) for step in range(1, 6)]
    assert tensorboard_scalars(tmp_path, "validation/loss") == [(5, 0.5)]


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str):
    monkeypatch.setattr(f"tah2.train.callbacks.{name}.find_spec", lambda wanted: None)
    with pytest.raises(ConfigError, match=rf"pip install 'tah2\[{package}\]'"):
        make_callbacks([name])


class FakeTracker(ModuleType):
    """Stands in for the wandb package."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}
        self.alerts: list[str] = []
        self.finished = 0

    def init(self, **arguments: Any) -> FakeTracker:
        self.inits.append(arguments)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(text)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> FakeTracker:
    fake = FakeTracker()
    monkeypatch.setattr("tah2.train.callbacks.wandb.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_keeps_its_run_when_resumed_and_gets_a_new_one_when_started_anew(tmp_path: Path, tracker: FakeTracker):
    for start in (0, 4, 0):
        log = WandbLog()
        log.on_start(RunInfo(tmp_path, "run", start, config={"seed": 1}, project="lab"))
        log.on_step(start + 1, {"loss": 1.0})
        log.on_end({"steps": 5})
    first, resumed, anew = (arguments["id"] for arguments in tracker.inits)
    assert first == resumed != anew
    assert tracker.inits[0]["project"] == "lab"
    assert tracker.inits[0]["config"] == {"seed": 1}
    assert tracker.logged[1] == (5, {"train/loss": 1.0})
    assert (tracker.finished, tracker.summary) == (3, {"steps": 5})


def test_wandb_alerts_on_warnings_alone(tmp_path: Path, tracker: FakeTracker):
    log = WandbLog()
    log.on_message("warning", "before the start")
    log.on_start(RunInfo(tmp_path, "run"))
    log.on_message("info", "fine")
    log.on_message("warning", "not fine")
    assert tracker.alerts == ["not fine"]


def bar(clock: list[float], *, terminal: bool = False) -> tuple[ProgressBar, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, soft_wrap=True)
    return ProgressBar(console, line_every_seconds=30.0, clock=lambda: clock[0]), out


def test_without_a_terminal_lines_come_now_and_then_and_at_the_end(tmp_path: Path):
    clock = [0.0]
    progress, out = bar(clock)
    progress.on_start(RunInfo(tmp_path, "run", 10, 20))
    for step in range(11, 21):
        clock[0] += 10
        progress.on_step(step, METRICS | {"speed/tokens_per_second": 3200.0})
    progress.on_end({"status": "finished"})
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("resumed after step 10")
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["step 11/20", "step 14/20", "step 17/20", "step 20/20"]
    assert lines[1] == "step 11/20  loss 1.5000  depth 1.25  3.2k tokens/s  ETA 1:30"
    assert lines[-1] == "finished after 1:40"


def test_on_a_terminal_there_is_a_bar_that_is_taken_down(tmp_path: Path):
    progress, out = bar([0.0], terminal=True)
    progress.on_start(RunInfo(tmp_path, "run", 0, 20))
    progress.on_step(5, METRICS)
    progress.on_end({"status": "interrupted"})
    assert "5/20" in out.getvalue()
    assert "loss 1.5000" in out.getvalue()
    assert out.getvalue().rstrip().endswith("interrupted after 0:00")


def test_messages_and_validations_are_printed_as_they_are(tmp_path: Path):
    progress, out = bar([0.0])
    progress.on_start(RunInfo(tmp_path, "run"))
    progress.on_message("warning", "look at [data/3] now")
    progress.on_validation(4, METRICS | {"depth/1/loss": 2.0, "depth/2/loss": 1.0, "depth/2/loss_measured": 1.25})
    assert "warning: look at [data/3] now" in out.getvalue()
    assert "validation at step 4: loss 1.5000  depth 1.25 (depth 1 2.0000, depth 2 1.2500)" in out.getvalue()


def test_numbers_are_short_and_unknown_ones_left_out():
    assert [short(value) for value in (12.0, 3210.0, 1_130_000.0)] == ["12", "3.2k", "1.1M"]
    assert [duration(seconds) for seconds in (9.4, 252.0, 3852.0)] == ["0:09", "4:12", "1:04:12"]
    assert describe({"loss": 1.0, "depth/mean": 1.0}, None) == "loss 1.0000"


def test_an_unknown_logger_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Unknown logger 'tensorbord'; did you mean 'tensorboard'"):
        check_loggers(["tensorbord"])


def test_the_usual_listeners_are_the_bar_the_log_and_the_named_ones():
    extra = Recorder()
    kinds = [type(callback) for callback in make_callbacks(["tensorboard", "tensorboard"], extra=[extra]).active]
    assert kinds == [ProgressBar, JsonlLog, TensorBoardLog, Recorder]
    assert [type(callback) for callback in make_callbacks([], progress=False).active] == [JsonlLog]


def test_other_ranks_have_no_listeners():
    assert make_callbacks(["tensorboard"], rank=1).active == []
    with pytest.raises(ConfigError, match="Unknown logger"):
        make_callbacks(["nothing"], rank=1)


def test_tensorboard_is_the_default_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    assert TensorBoardLog in [type(callback) for callback in make_callbacks().active]
    monkeypatch.setattr("tah2.train.callbacks.tensorboard.find_spec", lambda name: None)
    assert [type(callback) for callback in make_callbacks().active] == [ProgressBar, JsonlLog]
