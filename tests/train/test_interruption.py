"""A run may be killed, stopped or spoiled at any moment, and goes on as if nothing had been."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tah2.cli import main
from tah2.config.strict import ConfigError
from tah2.train import trainer as trainer_module
from tah2.train.health import NonFiniteLoss
from tah2.train.parallel import World
from tah2.train.trainer import Trainer, train
from tests.train.runs import config, curve, environment, recipe, records, run_on_two, same_curves, weights

SPARSE = {"logging": {"every": 3}}
"""Steps are summed up over windows that no checkpoint (every second step) respects."""


def written(folder: Path, *changes: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(folder / "run", *changes)))
    return path


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def steps_done(out: Path) -> int:
    """Steps that the log of a running process holds."""
    path = out / "metrics.jsonl"
    return sum('"kind": "step"' in line for line in path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(config(folder / "dense"))
    train(config(folder / "sparse", SPARSE))
    return {name: curve(folder / name) for name in ("dense", "sparse")}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_curve(tmp_path: Path, uninterrupted: dict[str, Any]):
    """SIGKILL at a random moment, whatever the process is doing."""
    path, out = written(tmp_path), tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-m", "tah2", "sft", str(path)], env=environment(), cwd=tmp_path)
    wanted, delay = random.randint(2, 7), random.random() * 0.2
    wait_for(lambda: steps_done(out) >= wanted or process.poll() is not None)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (out / "summary.json").exists():  # it was quicker than the signal: take its end away
        for end in ("summary.json", "model", "checkpoints/step-000009"):
            shutil.rmtree(out / end) if (out / end).is_dir() else (out / end).unlink()
    train(config(out))
    assert curve(out) == uninterrupted["dense"], (wanted, delay)
    assert records(out, "start")[-1]["step"] in (0, 2, 4, 6, 8)
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_sigterm_saves_exits_with_0_and_goes_on_to_the_same_curve(
    name: str, tmp_path: Path, uninterrupted: dict[str, Any]
):
    changes = [] if name == "dense" else [SPARSE]
    path, out = written(tmp_path, *changes), tmp_path / "run"
    handler = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        wait_for(lambda: steps_done(out) >= (4 if name == "dense" else 1))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # launchers repeat it

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(["sft", str(path)]) == 0
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["step"] < 9
    assert (out / "checkpoints" / f"step-{summary['step']:06d}" / "complete.json").exists()
    assert not (out / "model").exists()
    assert main(["sft", str(path)]) == 0
    assert records(out, "start")[-1]["step"] == summary["step"]
    assert curve(out) == uninterrupted[name]
    finished = json.loads((out / "summary.json").read_text())
    assert finished["tokens"] == sum(record["data/tokens"] for record in curve(out) if record["kind"] == "step")
    assert finished["seconds"] > summary["seconds"]


class Hostile:
    """A scheme that spoils one step: its loss or its gradient is not a number."""

    def __init__(self, scheme: Any, spoil: Callable[[Any], torch.Tensor], step: int, micro_batches: int) -> None:
        self.scheme, self.spoil, self.left = scheme, spoil, step * micro_batches
        self.freezes_backbone, self.looks_ahead = False, True

    def __call__(self, decoder: Any, batch: Any, context: Any) -> Any:
        outcome = self.scheme(decoder, batch, context)
        self.left -= 1
        if self.left < 0:
            object.__setattr__(outcome, "total", self.spoil(outcome.total))
        return outcome


def broken_gradient(loss: torch.Tensor) -> torch.Tensor:
    """As large as before, with an infinite slope."""
    return loss + torch.sqrt(loss - loss.detach())


@pytest.mark.parametrize(
    ("what", "spoil"), [("loss", lambda loss: loss * math.nan), ("gradient norm", broken_gradient)]
)
def test_a_loss_that_is_no_number_stops_the_run_before_the_update(
    what: str, spoil: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, uninterrupted: dict[str, Any]
):
    trainer = Trainer(config(tmp_path), World())
    trainer.scheme = Hostile(trainer.scheme, spoil, step=5, micro_batches=2)
    seen: list[dict[str, torch.Tensor]] = []
    update = trainer.optimizer.step

    def counted(*arguments: Any) -> Any:
        result = update(*arguments)
        seen.append(weights(trainer.decoder))
        return result

    trainer.optimizer.step = counted  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match=rf"^The {what} of step 6 is (nan|inf).*stopped before the update") as error:
        trainer.run()
    assert len(seen) == 5
    for name, tensor in trainer.decoder.state_dict().items():
        assert torch.equal(tensor, seen[-1][name])
    assert error.value.checkpoint == tmp_path / "checkpoints" / "step-000004"
    assert "depth 1: " in str(error.value)
    assert str(error.value.checkpoint) in str(error.value)
    assert records(tmp_path, "end")[0]["status"] == "failed"
    train(config(tmp_path))
    assert curve(tmp_path) == uninterrupted["dense"]


def test_the_command_says_it_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    plain = trainer_module.scheme_for
    monkeypatch.setattr(trainer_module, "scheme_for", lambda *a: Hostile(plain(*a), lambda loss: loss * math.nan, 0, 2))
    assert main(["sft", str(written(tmp_path))]) == 2
    assert "tah2: The loss of step 1 is nan" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one_and_one_resumes_what_two_began(tmp_path: Path):
    """One micro-batch per step, so that cutoffs and class balance pool the same tokens on one rank and on two."""
    whole = {"batch": {"tokens_per_micro_batch": 1000}, "budget": {"steps": 6}, "objective": {"decisions": "sampled"}}
    out = tmp_path / "run"
    told = run_on_two(recipe(out, whole), tmp_path)
    assert told.count("Task stop-chase") == 1, "rank 0 alone talks"
    train(config(tmp_path / "one", whole))
    same_curves(curve(out), curve(tmp_path / "one"), rel=1e-5)
    two, one = (load_file(run / "model" / "model.safetensors") for run in (out, tmp_path / "one"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints" / "step-000006")
    (out / "summary.json").unlink()
    train(config(out, whole))
    assert records(out, "start")[-1]["step"] == 4
    same_curves(curve(out), curve(tmp_path / "one"), rel=1e-5)


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path):
    train(config(tmp_path, {"budget": {"steps": 1}}))
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"procedural\.seed was 0, is 1"):
        train(config(tmp_path, {"budget": {"steps": 1}, "procedural": {"seed": 1}}))
