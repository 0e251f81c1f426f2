"""From a recipe to model and data: one copy of the weights, one start, one cache, and nothing left behind."""

from __future__ import annotations

import gc
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tah2.cli import main
from tah2.config.strict import build, merge, plain
from tah2.train import prepare as prepare_module
from tah2.train.parallel import World
from tah2.train.prepare import main_first, open_model, split_documents, start_tokens
from tah2.train.trainer import Trainer, train
from tests.data.conftest import chat, tokenizer, write_lines
from tests.train.runs import RECIPE, SHAPE, config, curve, records, run_one_step, weights

__all__ = ["tokenizer"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """An ordinary Hugging Face model folder in bf16, with a tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if name != "model_type"}
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, "vocab_size": len(tokenizer) + 10}))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows: list[Any] = [{"messages": chat(f"What is {i} plus one?", f"It is {i + 1}.")} for i in range(24)]
    rows.insert(3, {"messages": "no list"})
    return write_lines(tmp_path_factory.mktemp("data") / "talks.jsonl", rows)


def talks(pretrained: Path, conversations: Path, **data: Any) -> dict[str, Any]:
    """Changes over `RECIPE`: these conversations, this model."""
    sources = {"sources": [{"path": str(conversations)}], "validation_samples": 2, **data}
    return {"model": {"path": str(pretrained)}, "procedural": None, "data": sources, "batch": {"samples": 3}}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_conversations_train_from_the_command_line(
    pretrained: Path, conversations: Path, tmp_path: Path, own_temporary_folder: Path
):
    import yaml

    recipe = merge(merge(RECIPE, talks(pretrained, conversations)), {"out": str(tmp_path / "run")})
    del recipe["model"]["shape"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["sft", str(tmp_path / "recipe.yaml"), "budget.steps=12", "--logging.every", "1"]) == 0
    out = tmp_path / "run"
    losses = [record["loss/prediction"] for record in records(out, "step")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    told = records(out, "message")[0]["text"]
    assert "25 rows read" in told
    assert "talks.jsonl:4" in told
    exported = PreTrainedTokenizerFast.from_pretrained(out / "model")
    assert exported.chat_template
    model = open_model(config(tmp_path / "again", {"model": {"path": str(out / "model")}, "loop": None}))
    assert model.export_dtype is torch.bfloat16
    assert model.model.model.loop == build(type(model.model.model.loop), recipe["loop"])
    model.close()
    assert not list(own_temporary_folder.iterdir())


def test_a_run_leaves_no_temporary_folder_behind_even_if_it_fails(
    pretrained: Path, conversations: Path, tmp_path: Path, own_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = Trainer(config(tmp_path / "run", talks(pretrained, conversations)), World())
    assert trainer.opened.tokenizer_folder is not None
    assert trainer.opened.tokenizer_folder.parent == own_temporary_folder

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(trainer, "step", fail)
    with pytest.raises(RuntimeError, match="no"):
        trainer.run()
    assert not list(own_temporary_folder.iterdir())


def test_the_fp32_model_is_the_only_copy_of_the_weights(pretrained: Path, tmp_path: Path):
    opened = open_model(config(tmp_path, {"model": {"path": str(pretrained)}}))
    assert {p.dtype for p in opened.model.parameters()} == {torch.float32}
    vocabulary = opened.model.model.backbone.vocab_size
    tables = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.shape == (vocabulary, 16)]
    assert len({table.data_ptr() for table in tables}) == 2, "embeddings and head, once each"
    opened.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_never_writes_into_the_checkpoint_that_it_began_from(
    pretrained: Path, conversations: Path, tmp_path: Path, dtype: torch.dtype
):
    base = tmp_path / "base"
    Qwen3ForCausalLM.from_pretrained(pretrained, dtype=dtype).save_pretrained(base)
    PreTrainedTokenizerFast.from_pretrained(pretrained).save_pretrained(base)
    before = (base / "model.safetensors").read_bytes()
    train(config(tmp_path / "run", talks(base, conversations), {"budget": {"steps": 1}}))
    assert (base / "model.safetensors").read_bytes() == before


def test_the_updater_is_fitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the training data of a fresh loop; neither when a run goes on nor where a checkpoint brings an updater."""
    fitted: list[int] = []
    fit = prepare_module.fit_updater
    monkeypatch.setattr(prepare_module, "fit_updater", lambda d, t, c: fitted.append(len(t)) or fit(d, t, c))
    first = Trainer(config(tmp_path / "first"), World())
    assert len(fitted) == 1
    first.run()
    (tmp_path / "first" / "summary.json").unlink()
    Trainer(config(tmp_path / "first"), World())
    again = {"model": {"path": str(tmp_path / "first" / "model")}, "loop": None}
    second = Trainer(config(tmp_path / "second", again), World())
    assert len(fitted) == 1
    for name, tensor in weights(second.decoder).items():
        assert torch.equal(tensor, first.decoder.state_dict()[name]), name
    wider = {**again, "loop": {"kind": "tah2", "max_depth": 2, "updater_width": 9}}
    Trainer(config(tmp_path / "third", wider), World())
    assert len(fitted) == 2, "an updater of another width begins anew"
    Trainer(config(tmp_path / "fourth", {"model": {"start": {"updater": "random"}}}), World())
    assert len(fitted) == 2


def test_the_start_is_fitted_on_the_first_training_tokens(tmp_path: Path):
    asked = {"procedural": {"samples": 200}, "model": {"start": {"tokens": 3000}}}
    trainer = Trainer(config(tmp_path, asked), World())
    tokens = start_tokens(trainer.config, trainer.decoder, trainer.data)
    assert len(tokens) == 3000
    step = next(iter(trainer.data.steps(trainer.config.batch)))
    first = split_documents(step.micro_batches[0])[0]
    assert torch.equal(tokens.ids[: len(first)], first)
    assert torch.equal((tokens.position == 0).nonzero()[:2, 0], torch.tensor([0, len(first)]))


def test_tokenised_data_are_cached_and_change_nothing(pretrained: Path, conversations: Path, tmp_path: Path):
    changes = talks(pretrained, conversations), {"budget": {"steps": 2}}
    cached = {"data": {"cache_dir": str(tmp_path / "cache")}}
    train(config(tmp_path / "plain", *changes))
    train(config(tmp_path / "writes", *changes, cached))
    (cache,) = (tmp_path / "cache").iterdir()
    made = cache.stat().st_mtime_ns
    train(config(tmp_path / "reads", *changes, cached))
    assert cache.stat().st_mtime_ns == made
    assert curve(tmp_path / "plain") == curve(tmp_path / "writes") == curve(tmp_path / "reads")


def test_streamed_conversations_train_and_go_on_exactly(pretrained: Path, conversations: Path, tmp_path: Path):
    streamed = talks(pretrained, conversations, streaming=True), {"budget": {"steps": None, "tokens": 400}}
    train(config(tmp_path / "whole", *streamed))
    assert run_one_step(config(tmp_path / "stopped", *streamed))["status"] == "interrupted"
    train(config(tmp_path / "stopped", *streamed))
    assert curve(tmp_path / "stopped") == curve(tmp_path / "whole")
    assert records(tmp_path / "stopped", "start")[-1]["step"] == 1


class Barrier(World):
    """A world that writes down when it waits."""

    def barrier(self) -> None:
        seen.append("wait")


seen: list[str] = []


@pytest.mark.parametrize(("rank", "order"), [(0, ["body", "wait"]), (1, ["wait", "body"])])
def test_rank_0_makes_the_cache_before_others_look(rank: int, order: list[str]):
    seen.clear()
    with main_first(Barrier(rank, 2)):
        seen.append("body")
    assert seen == order


def a_slow_rank_0(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder / 'meet'}", timedelta(seconds=2), 2, rank)
    with World(rank, 2, rank, torch.device("cpu"), dist.group.WORLD) as world:
        with main_first(world, patience=timedelta(seconds=60)):
            assert (folder / "cache").is_file() or world.is_main
            time.sleep(3 * world.is_main)
            (folder / "cache").touch()
        world.barrier()
        (folder / f"{rank}.done").touch()


@pytest.mark.slow
def test_others_wait_for_rank_0_longer_than_for_any_step(tmp_path: Path):
    spawn(a_slow_rank_0, (tmp_path,), nprocs=2)
    assert all((tmp_path / f"{rank}.done").is_file() for rank in range(2))


def test_recipes_survive_printing(tmp_path: Path):
    made = config(tmp_path)
    assert build(type(made), plain(made)) == made
