"""Adapters: only they and the loop's own parts learn, and folding them in changes nothing that the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tah2
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.scoring import score
from tah2.train.lora import LoraConfig, add_adapters, is_adapter, merge
from tah2.train.parallel import World
from tah2.train.trainer import Trainer, train
from tests.model.tiny import random_tokens, tiny_model
from tests.train.runs import PLAIN, config, curve, recipe, run_on_two, same_curves, weights

ADAPTER: dict[str, Any] = {"adapter": {"rank": 3, "alpha": 6.0, "dropout": 0.2}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    train(config(folder, PLAIN, {"budget": {"steps": 1}, "validation": {"every": 0}}))
    return folder / "model"


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """An adapted run, and its weights before it."""
    out = tmp_path_factory.mktemp("adapted")
    trainer = Trainer(config(out, {"model": {"path": str(base)}}, ADAPTER), World())
    before = weights(trainer.decoder)
    trainer.run()
    return trainer, before


def test_only_adapters_and_the_loops_parts_change(trained: tuple[Trainer, dict[str, torch.Tensor]]):
    trainer, before = trained
    now = trainer.decoder.state_dict()
    changed = {name for name in before if not torch.equal(now[name], before[name])}
    assert changed == {name for name in before if is_adapter(name) or name.startswith(("reentry.", "gate."))}
    assert sum(is_adapter(name) for name in changed) == 2 * 2 * 7, "two factors, two layers, seven projections"


def test_the_export_is_an_ordinary_checkpoint_that_says_what_the_adapted_model_says(
    trained: tuple[Trainer, dict[str, torch.Tensor]],
):
    trainer, before = trained
    exported = tah2.load(trainer.config.out / "model").model
    tokens = random_tokens(9, 5)
    with torch.no_grad():
        ours, theirs = (score(decoder.eval(), tokens).logits for decoder in (exported, trainer.decoder))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert exported.state_dict().keys() == {name for name in before if not is_adapter(name)}
    moved = [name for name, tensor in exported.state_dict().items() if not torch.equal(tensor, before[name])]
    assert any(name.endswith("q_proj.weight") for name in moved)
    assert "embed_tokens.weight" not in moved


def test_merging_gives_the_same_logits_and_training_begins_at_the_base():
    plain, adapted, tokens = tiny_model(seed=1), tiny_model(seed=1), random_tokens(8, 6)
    add_adapters(adapted, LoraConfig(rank=2))
    with torch.no_grad():
        torch.testing.assert_close(score(adapted, tokens).logits, score(plain, tokens).logits, rtol=0, atol=0)
        for name, parameter in adapted.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.3)
        spoken = score(adapted, tokens).logits
        assert (spoken - score(plain, tokens).logits).abs().max() > 0.05
        merge(adapted)
        assert not any(is_adapter(name) for name, _ in adapted.named_parameters())
        torch.testing.assert_close(score(adapted, tokens).logits, spoken, rtol=1e-4, atol=1e-4)


def test_dropout_is_off_in_validation_and_a_resumed_run_draws_the_same(base: Path, tmp_path: Path):
    changes = {"model": {"path": str(base)}}, ADAPTER, {"validation": {"every": 1}, "budget": {"steps": 4}}
    train(config(tmp_path / "whole", *changes))
    stopped = Trainer(config(tmp_path / "stopped", *changes), World())
    step = stopped.step

    def then_stop(*arguments: Any) -> None:
        step(*arguments)
        stopped.stop.asked = 0.0 if stopped.state.step == 1 else None

    stopped.step = then_stop  # type: ignore[method-assign]
    assert stopped.run()["status"] == "interrupted"
    assert stopped.decoder.training
    first, second = (stopped._validate() for _ in range(2))
    assert first == second
    train(config(tmp_path / "stopped", *changes))
    assert curve(tmp_path / "stopped") == curve(tmp_path / "whole")


def test_adapters_go_where_they_are_told():
    decoder = tiny_model()
    add_adapters(decoder, LoraConfig(targets=("q_proj", "down_proj")))
    adapted = {name.rpartition(".")[0].rpartition(".")[2] for name, _ in decoder.named_parameters() if is_adapter(name)}
    assert adapted == {"q_proj", "down_proj"}
    learning = {name.partition(".")[0] for name, p in decoder.named_parameters() if p.requires_grad}
    assert learning == {"layers", "reentry", "gate"}


@pytest.mark.parametrize("values", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}])
def test_adapters_without_sense_are_refused(values: dict[str, Any]):
    with pytest.raises(ConfigError, match="An adapter needs"):
        LoraConfig(**values)


def test_an_unknown_target_is_named():
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        LoraConfig(targets=("q_pro",))


def test_an_adapter_beside_a_frozen_backbone_is_refused(base: Path, tmp_path: Path):
    frozen = {"model": {"path": str(base)}, "loop": {"kind": "ouro-adaptive"}}
    with pytest.raises(ConfigError, match="trains the gate alone"):
        Trainer(config(tmp_path, frozen, ADAPTER), World())


def test_loops_are_what_they_were(trained: tuple[Trainer, dict[str, torch.Tensor]]):
    loop = tah2.load(trained[0].config.out / "model").model.loop
    assert loop == LoopConfig("tah2", 2, updater_width=8, decider_width=8, decider_top_k=4)


@pytest.mark.slow
def test_two_processes_adapt_like_one(base: Path, tmp_path: Path):
    """Frozen weights share their shards with trained ones, over several micro-batches of a step."""
    fixed = {"loop": {"kind": "tah2-fixed"}, "optimizer": {"gate_learning_rate": None}, "budget": {"steps": 3}}
    several = {"batch": {"tokens_per_micro_batch": 48}, "adapter": {"rank": 3, "alpha": 6.0}}
    changes = {"model": {"path": str(base)}}, fixed, several
    train(config(tmp_path / "one", *changes))
    run_on_two(recipe(tmp_path / "two", *changes), tmp_path)
    same_curves(curve(tmp_path / "two"), curve(tmp_path / "one"), rel=1e-5)
