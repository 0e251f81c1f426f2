"""A resumed run is the run that was interrupted; a checkpoint is whole or it is not taken."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from tah2.config.strict import ConfigError
from tah2.data.order import LoaderState
from tah2.model.checkpoint import load as load_model
from tah2.model.hf import LoopedConfig
from tah2.model.loop import LoopedDecoder
from tah2.model.scoring import score
from tah2.train import resume
from tah2.train.export import export_hf, whole_tensors
from tah2.train.lora import LoraConfig, add_adapters, merge
from tah2.train.parallel import World, gathered, shard
from tah2.train.resume import CheckpointStore, TrainingState
from tests.train.tiny import LOOP, RANKS, batch_loss, run_batch, tiny_decoder

CONFIG = {"optimizer": {"rate": 1e-3, "betas": (0.9, 0.95)}, "seed": 3}
ALONE = [RANKS[0][number] + RANKS[1][number] for number in range(2)]
HALF, WHOLE = 2, 4


def fresh(seed: int = 0, world: World | None = None) -> TrainingState:
    decoder = shard(tiny_decoder(True, seed), world or World())
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=2e-3, eps=1e-4)
    return TrainingState(decoder, optimizer, CONFIG)


def train(state: TrainingState, until: int, batches: list[list[range]] = ALONE, world: World | None = None) -> None:
    assert isinstance(state.decoder, LoopedDecoder)
    for _ in range(state.step, until):
        state.optimizer.zero_grad()
        for documents in batches:
            with gathered(state.decoder):
                batch_loss(state.decoder, documents, world or World()).backward()
        state.optimizer.step()
        state.step += 1


def everything(state: TrainingState, world: World | None = None) -> dict[str, Tensor]:
    """Weights and optimizer state, whole."""
    names = {parameter: name for name, parameter in state.decoder.named_parameters()}
    assert isinstance(state.decoder, LoopedDecoder)
    tensors = whole_tensors(state.decoder, torch.float32, world or World())
    for parameter, moments in state.optimizer.state.items():
        for key, value in moments.items():
            tensors[f"{names[parameter]} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: tensor.clone() for name, tensor in tensors.items()}


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    state = fresh()
    train(state, WHOLE)
    return everything(state)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, uninterrupted: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the run trains on while the checkpoint is still being written."""
    trained_on = threading.Event()
    write = resume.FileSystemWriter.write_data

    def late(self: Any, *arguments: Any) -> Any:
        assert trained_on.wait(30)
        return write(self, *arguments)

    monkeypatch.setattr(resume.FileSystemWriter, "write_data", late)
    state = fresh()
    train(state, HALF)
    state.loader = LoaderState(epoch=1, sample=17, step=HALF, fingerprint="data")
    state.counters, state.metrics = {"tokens": 123.0}, {"best": {"loss": 0.1 + 0.2}}
    with CheckpointStore(tmp_path) as store:
        path = store.save(state)
        draws = random.random(), np.random.rand(), float(torch.rand(()))
        train(state, WHOLE)
        assert store.latest() is None
        trained_on.set()
        store.wait()
        assert store.latest() == path == tmp_path / "step-000002"
    assert identical(everything(state), uninterrupted)

    resumed = fresh(seed=9)
    with CheckpointStore(tmp_path) as store:
        store.load(path, resumed)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == draws
    assert (resumed.step, resumed.loader) == (HALF, state.loader)
    assert (resumed.counters, resumed.metrics) == (state.counters, state.metrics)
    train(resumed, WHOLE)
    assert identical(everything(resumed), uninterrupted)


def on_two_ranks(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'meet'}", timedelta(seconds=60), 2, rank)
    with World(rank, 2, rank, torch.device("cpu"), dist.group.WORLD) as world:
        with CheckpointStore(folder / "two", world=world) as store:
            state = fresh(rank, world)
            train(state, HALF, RANKS[rank], world)
            torch.manual_seed(rank)
            store.save(state)
            draw = torch.rand(3)
            train(state, WHOLE, RANKS[rank], world)
            store.wait()
            newest = store.latest()
            assert newest is not None
            resumed = fresh(7, world)
            store.load(newest, resumed)
            same_draw = torch.equal(torch.rand(3), draw)
            train(resumed, WHOLE, RANKS[rank], world)
            pair = everything(resumed, world), everything(state, world)
        with CheckpointStore(folder / "one", world=world) as store:
            grown = fresh(8, world)
            store.load(folder / "one" / "step-000002", grown)
            train(grown, WHOLE, RANKS[rank], world)
            results = {"same": same_draw and identical(*pair), "grown": everything(grown, world)}
        torch.save(results, folder / f"{rank}.pt")


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, uninterrupted: dict[str, Tensor]) -> None:
    state = fresh()
    train(state, HALF)
    with CheckpointStore(tmp_path / "one") as store:
        store.save(state, asynchronous=False)
    spawn(on_two_ranks, (tmp_path,), nprocs=2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [result["same"] for result in results] == [True, True]
    torch.testing.assert_close(results[0]["grown"], uninterrupted, rtol=1e-5, atol=1e-5)

    shrunk = fresh(seed=5)
    with CheckpointStore(tmp_path / "two") as store:
        newest = store.latest()
        assert newest is not None
        store.load(newest, shrunk)
    train(shrunk, WHOLE)
    torch.testing.assert_close(everything(shrunk), uninterrupted, rtol=1e-5, atol=1e-5)


def save_and_stall(folder: Path) -> None:
    """Save step 1; begin to save step 2 in the background and never end."""
    state = fresh()
    store = CheckpointStore(folder)
    train(state, 1)
    store.save(state, asynchronous=False)
    train(state, 2)
    resume.FileSystemWriter.finish = lambda *arguments: time.sleep(600)
    store.save(state)
    (folder / "training on").touch()
    time.sleep(600)


@pytest.mark.slow
def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=save_and_stall, args=(tmp_path,))
    process.start()
    partial = tmp_path / "step-000002.partial"
    deadline = time.monotonic() + 60
    while not ((tmp_path / "training on").exists() and list(partial.glob("*.distcp"))):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert partial.is_dir()

    state = fresh(seed=4)
    with CheckpointStore(tmp_path) as store:
        newest = store.latest()
        assert newest == tmp_path / "step-000001"
        store.load(newest, state)
        train(state, 2)
        store.save(state)
        store.wait()
        assert store.latest() == tmp_path / "step-000002"
    assert not partial.exists()
    reference = fresh()
    train(reference, 2)
    assert identical(everything(state), everything(reference))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 1 and 2, both kept."""
    state = fresh()
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            train(state, step, ALONE[:1])
            store.save(state)
    return tmp_path


def test_the_newest_checkpoints_are_kept_and_an_abandoned_branch_ages_out(saved: Path) -> None:
    state = fresh()
    with CheckpointStore(saved, keep=2) as store:
        store.load(saved / "step-000001", state)
        state.step = 3
        assert store.save(state, asynchronous=False) == store.latest()
        assert sorted(path.name for path in saved.iterdir()) == ["step-000002", "step-000003"]
        store.load(saved / "step-000002", state)
        state.step = 1
        store.save(state, asynchronous=False)
        assert store.latest() == saved / "step-000001"
        assert sorted(path.name for path in saved.iterdir()) == ["step-000001", "step-000003"]
        assert store.save(state, asynchronous=False) == saved / "step-000001"


def test_a_step_saved_again_replaces_the_checkpoint_of_another_run(saved: Path) -> None:
    other = fresh(seed=6)
    other.step = 2
    with CheckpointStore(saved) as store:
        store.save(other)
    again = fresh()
    with CheckpointStore(saved) as store:
        store.load(saved / "step-000002", again)
    assert identical(everything(again), everything(other))


@pytest.mark.parametrize("damage", ["marker", "truncated", "missing"])
def test_a_checkpoint_that_is_not_whole_is_never_taken(saved: Path, damage: str) -> None:
    newest = saved / "step-000002"
    shard_file = next(newest.glob("*.distcp"))
    if damage == "marker":
        (newest / resume.MARKER).unlink()
    elif damage == "truncated":
        os.truncate(shard_file, shard_file.stat().st_size - 1)
    else:
        shard_file.unlink()
    expected = resume.MARKER if damage == "marker" else shard_file.name
    with CheckpointStore(saved) as store:
        with pytest.raises(ConfigError, match=f"{expected}.*resume from another"):
            store.load(newest, fresh())
        with pytest.warns(UserWarning, match=expected):
            assert store.latest() == saved / "step-000001"


def test_a_checkpoint_with_scrambled_contents_is_refused_in_one_sentence(saved: Path) -> None:
    index = saved / "step-000002" / ".metadata"
    index.write_bytes(b"x" * index.stat().st_size)
    with CheckpointStore(saved) as store, pytest.raises(ConfigError, match="cannot be read"):
        store.load(saved / "step-000002", fresh())


def test_another_configuration_is_refused_by_name(saved: Path) -> None:
    state = fresh()
    state.config = {"optimizer": {"rate": 2e-3, "betas": (0.9, 0.95)}, "seed": 3, "loop": "tah2"}
    before = everything(state)
    message = r"optimizer\.rate was 0\.001, is 0\.002; loop was absent, is \"tah2\""
    with CheckpointStore(saved) as store, pytest.raises(ConfigError, match=message):
        store.load(saved / "step-000002", state)
    assert identical(everything(state), before)
    assert state.step == 0


def test_other_parameters_are_refused_by_name(saved: Path) -> None:
    state = fresh()
    state.decoder.extra = torch.nn.Linear(2, 2, bias=False)
    with CheckpointStore(saved) as store, pytest.raises(ConfigError, match=r"missing tensors: model/extra\.weight"):
        store.load(saved / "step-000002", state)
    fewer = fresh()
    fewer.optimizer = torch.optim.AdamW(fewer.decoder.gate.parameters())
    with CheckpointStore(saved) as store, pytest.raises(ConfigError, match=r"optimizes .* which this run does not"):
        store.load(saved / "step-000002", fewer)


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "new") as store:
        assert store.latest() is None
        with pytest.raises(ConfigError, match="does not exist"):
            store.load(tmp_path / "new" / "step-000001", fresh())


def test_a_failed_save_is_reported_and_leaves_the_checkpoints_before(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    state = fresh()
    state.step = 3
    with CheckpointStore(saved) as store:
        with monkeypatch.context() as patch:
            patch.setattr(resume.FileSystemWriter, "write_data", full)
            store.save(state)
            with pytest.raises(RuntimeError, match=r"step-000003 could not be saved.*No space left"):
                store.wait()
        assert store.latest() == saved / "step-000002"
        store.save(state, asynchronous=False)
        assert store.latest() == saved / "step-000003"


def test_a_quicker_rank_may_have_made_the_folder_that_is_written_to(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in a save the same folder lies there; another rank's writer remakes it while rank 0 cleans up."""
    stale = saved / "step-000003.partial"
    stale.mkdir()
    (stale / "__0_0.distcp").write_bytes(b"torn")
    remove = resume.shutil.rmtree

    def remove_and_lose_the_race(path: Path) -> None:
        remove(path)
        path.mkdir()

    monkeypatch.setattr(resume.shutil, "rmtree", remove_and_lose_the_race)
    state = fresh()
    state.step = 3
    with CheckpointStore(saved, keep=9) as store:
        assert store.save(state, asynchronous=False) == store.latest() == saved / "step-000003"


def test_parameters_that_never_had_a_gradient_resume_without_optimizer_state(tmp_path: Path) -> None:
    state = fresh()
    state.decoder.gate.requires_grad_(False)
    train(state, 1)
    state.decoder.gate.requires_grad_(True)
    resumed = fresh(seed=3)
    with CheckpointStore(tmp_path) as store:
        store.load(store.save(state, asynchronous=False), resumed)
    assert identical(everything(resumed), everything(state))
    assert len(resumed.optimizer.state) < len(list(resumed.decoder.parameters()))


HF_BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "tie_word_embeddings": True,
}


def looped_config() -> LoopedConfig:
    return LoopedConfig(backbone=HF_BACKBONE, loop={n: getattr(LOOP, n) for n in LOOP.__dataclass_fields__})


def logits(decoder: LoopedDecoder) -> Tensor:
    tokens, _, _ = run_batch(decoder, ALONE[0], World())
    return score(decoder, tokens).logits


def test_an_exported_model_reloads_strictly_with_equal_logits(tmp_path: Path) -> None:
    tokenizer = tmp_path / "source"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "model.safetensors").write_text("not copied")
    decoder = tiny_decoder(True)
    out = export_hf(
        decoder,
        looped_config(),
        tokenizer,
        {"temperature": 0.6, "do_sample": True},
        tmp_path / "o",
        dtype=torch.float32,
    )
    model = load_model(out)
    assert torch.equal(logits(model.model), logits(decoder))
    assert model.generation_config.temperature == 0.6
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert len(list(out.glob("*.safetensors"))) == 1
    halved = load_model(export_hf(decoder, looped_config(), None, None, tmp_path / "half"))
    assert {p.dtype for p in halved.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_folds_adapters_in_and_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    decoder = tiny_decoder(True)
    add_adapters(decoder, LoraConfig(rank=2))
    for name, parameter in decoder.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.3)
    before = logits(decoder)
    model = load_model(export_hf(decoder, looped_config(), None, None, tmp_path / "out", dtype=torch.float32))
    torch.testing.assert_close(logits(model.model), before)
    assert torch.equal(logits(decoder), before)
    merge(decoder)
    merged = decoder.state_dict()
    exported = model.model.state_dict()
    assert merged.keys() == exported.keys()
    torch.testing.assert_close(dict(exported), dict(merged))


def test_export_without_a_tokenizer_to_copy_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer files"):
        export_hf(tiny_decoder(True), looped_config(), tmp_path, None, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    shutil.rmtree(tmp_path / "out")
