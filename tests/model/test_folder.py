"""A checkpoint folder is whole or visibly not a checkpoint, whenever its writer dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tah2
from tah2.config.strict import ConfigError
from tah2.model import folder as folders
from tah2.model.folder import whole_folder
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tests.model.tiny import tiny_loop

SHAPE = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "eos_token_id": 2,
}


def a_model(seed: int) -> LoopedForCausalLM:
    torch.manual_seed(seed)
    config = LoopedConfig(backbone=SHAPE, loop={"kind": "tah2", "max_depth": 2, "updater_width": 3})
    model = LoopedForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(float(seed))
    return model


class Killed(BaseException):
    """The process dies here; nothing of it runs any more, cleaning up included."""


def count_then_kill(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Every file operation of `folder` counts; the one numbered `at` kills, and so does all that follows."""
    done = 0

    def watched(operation):
        def run(*arguments, **options):
            nonlocal done
            done += 1
            if done >= at:
                raise Killed
            return operation(*arguments, **options)

        return run

    for name in ("replace", "open", "fsync"):
        monkeypatch.setattr(folders.os, name, watched(getattr(os, name)))
    for name in ("unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, watched(getattr(Path, name)))
    monkeypatch.setattr(folders.shutil, "rmtree", watched(shutil.rmtree))
    return lambda: done


def loaded_norm(folder: Path) -> float | None:
    """Which checkpoint the folder holds (by the value that marks it), or None where nothing loads."""
    try:
        model = tah2.load(folder)
    except (ConfigError, OSError):
        return None
    return float(model.model.norm.weight.detach()[0])


def written(model: LoopedForCausalLM) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        model.write(folder, max_shard_size="4KB")

    return write


@pytest.mark.parametrize("there_is_an_old_one", [False, True])
def test_a_writer_killed_at_any_moment_leaves_no_half_checkpoint(
    there_is_an_old_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The old checkpoint, the new one, or something that no loader takes; and the next save repairs it."""
    old, new = a_model(1), a_model(2)
    prepared = {name: tmp_path / name for name in ("old", "new")}
    for name, model in (("old", old), ("new", new)):
        prepared[name].mkdir()
        written(model)(prepared[name])
    outcomes, at = [], 0
    while not outcomes or outcomes[-1] != "finished":
        at += 1
        target = tmp_path / f"target-{at}"
        if there_is_an_old_one:
            shutil.copytree(prepared["old"], target)
        with monkeypatch.context() as patch:
            count_then_kill(patch, at)
            try:
                with whole_folder(target) as staging:
                    shutil.copytree(prepared["new"], staging, dirs_exist_ok=True)
                outcome = "finished"
            except Killed:
                outcome = "killed"
        found = loaded_norm(target)
        assert found in ((None, 1.0, 2.0) if there_is_an_old_one else (None, 2.0))
        outcomes.append(outcome)
        if outcome == "finished" or at % 4 == 0:
            with whole_folder(target) as staging:
                shutil.copytree(prepared["new"], staging, dirs_exist_ok=True)
            assert loaded_norm(target) == 2.0
            assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in prepared["new"].iterdir())
        shutil.rmtree(target, ignore_errors=True)
    assert len(outcomes) > 20, "the test wants many places to die"


def test_a_writer_that_fails_leaves_the_old_checkpoint(tmp_path: Path):
    model = a_model(1)
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(RuntimeError, match="disk"), whole_folder(tmp_path / "out") as staging:
        (staging / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("disk full")
    assert loaded_norm(tmp_path / "out") == 1.0
    assert not (tmp_path / "out" / folders.UNFINISHED).exists()


def test_an_interrupted_save_is_named_as_such(tmp_path: Path):
    (tmp_path / "out" / folders.UNFINISHED).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"a save into it was interrupted.*not a complete checkpoint"):
        tah2.load(tmp_path / "out")


def test_shards_of_an_earlier_save_do_not_stay(tmp_path: Path):
    a_model(1).save_pretrained(tmp_path / "out", max_shard_size="4KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    (tmp_path / "out" / "notes.txt").write_text("mine")
    a_model(2).save_pretrained(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert loaded_norm(tmp_path / "out") == 2.0
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_save_that_writes_no_config_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no config.json"), whole_folder(tmp_path / "out") as staging:
        (staging / "model.safetensors").write_bytes(b"")
    assert loaded_norm(tmp_path / "out") is None


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        a_model(1).save_pretrained(tmp_path / "out")


def test_the_loop_of_a_checkpoint_is_read_back(tmp_path: Path):
    a_model(1).save_pretrained(tmp_path)
    assert tah2.load(tmp_path).model.loop.updater_width == 3 != tiny_loop().updater_width
