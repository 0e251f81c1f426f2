import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tah2.cli.recipe import load_recipe
from tah2.config.strict import build, merge
from tah2.data.pocket import PocketWorld
from tah2.data.tags import HOP
from tah2.model.checkpoint import load
from tah2.train import pocket_base
from tah2.train.config import TrainConfig
from tah2.train.pocket_base import COPY_LOSS, STEP_LOSS, BaseNotLearned, Stage, make_base
from tah2.train.prepare import open_model
from tah2.train.trainer import train

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "pocket"
SHIPPED = ROOT / "tah2" / "assets" / "pocket-base"


def base_recipe():
    return yaml.safe_load((RECIPES / "base.yaml").read_text())


def test_the_shipped_base_takes_one_look_up_nearly_always():
    store = PocketWorld(base=True).generate(60, seed=5, split="test")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED).eval()
    right = []
    for index in range(len(store)):
        sample = store.sample(index)
        with torch.no_grad():
            guess = model(torch.tensor(sample.ids[None, :-1]).long()).logits[0].argmax(-1).numpy()
        steps = sample.tags[1:] == HOP + 1
        right += (guess == sample.ids[1:])[steps].tolist()
    assert len(right) > 200
    assert sum(right) / len(right) > 0.98


def test_the_shipped_base_has_the_worlds_tokenizer_and_the_recipes_shape():
    world, shape = PocketWorld(), base_recipe()["model"]["shape"]
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(world.vocabulary.words)
    assert shape["vocab_size"] == world.vocab_size
    assert json.loads((SHIPPED / "config.json").read_text()).items() >= shape.items()
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 3e6


@pytest.mark.parametrize("name", ["standard", "huginn", "ouro", "tah2-fixed", "tah2"])
def test_recipes_start_from_the_shipped_base(name, tmp_path):
    changes = [f"out={tmp_path}", f"model.path={SHIPPED}"]
    config = build(TrainConfig, load_recipe(RECIPES / f"{name}.yaml", changes))
    opened = open_model(config)
    parameters = dict(opened.model.named_parameters())
    added = sum(p.numel() for key, p in parameters.items() if "reentry" in key or "gate" in key.split("."))
    assert added < 0.08 * (sum(p.numel() for p in parameters.values()) - added)
    assert (added > 0) == (name in ("huginn", "tah2-fixed", "tah2"))
    opened.close()


def scripted(monkeypatch, losses):
    """Rounds that end with the given (look-up, copy) losses instead of training; returns the recipes they got."""
    seen, left = [], iter(losses)

    def round_of(config):
        seen.append(config)
        step, copy = next(left)
        return {"validation": {STEP_LOSS: step, COPY_LOSS: copy}}

    monkeypatch.setattr(pocket_base, "train", round_of)
    monkeypatch.setattr(pocket_base, "ship", lambda trained, recipe, seed, target: trained)
    return seen


def test_a_base_trains_until_its_losses_are_low(monkeypatch, tmp_path):
    stages = (Stage(4, {STEP_LOSS: 0.1}), Stage(12, {STEP_LOSS: 0.01, COPY_LOSS: 0.02}))
    monkeypatch.setattr(pocket_base, "CURRICULUM", stages)
    seen = scripted(monkeypatch, [(0.5, 9.0), (0.05, 9.0), (0.001, 0.5), (0.001, 0.02)])
    assert make_base(base_recipe(), 3, tmp_path) == tmp_path / "round-4" / "model"
    assert [config.procedural.pocket.letters_used for config in seen] == [4, 4, 12, 12]
    assert [config.model.path for config in seen] == [
        None,
        *(str(tmp_path / f"round-{n}" / "model") for n in (1, 2, 3)),
    ]
    assert len({config.procedural.seed for config in seen}) == 4
    assert {config.seed for config in seen} == {3}


def test_a_base_that_does_not_learn_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(pocket_base, "CURRICULUM", (Stage(4, {STEP_LOSS: 0.1}, most_rounds=2),))
    scripted(monkeypatch, [(0.5, 1.0), (0.4, 1.0)])
    with pytest.raises(BaseNotLearned, match="2 rounds with 4 letters"):
        make_base(base_recipe(), 0, tmp_path)


def test_a_trained_round_is_shipped_as_a_plain_backbone(tmp_path):
    changes = {"out": str(tmp_path / "run"), "budget": {"steps": 1}, "procedural": {"samples": 40}}
    recipe = merge(base_recipe(), changes)
    train(build(TrainConfig, recipe))
    trained = tmp_path / "run" / "model"
    pocket_base.ship(trained, recipe, 7, tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert type(plain).__name__ == "Qwen3ForCausalLM"
    problem = PocketWorld().problems(1, 0)[0]
    ids = torch.tensor([[*problem.prompt_ids, *problem.gold_ids]])
    with torch.no_grad():
        assert (plain(ids).logits - load(trained).eval()(ids).logits).abs().max() < 1e-4
    assert "--seed 7" in (tmp_path / "base" / "README.md").read_text()


def test_polish_is_not_required(monkeypatch, tmp_path):
    stages = (Stage(4, {STEP_LOSS: 0.1}), Stage(4, {STEP_LOSS: 0.0}, most_rounds=2, required=False))
    monkeypatch.setattr(pocket_base, "CURRICULUM", stages)
    scripted(monkeypatch, [(0.05, 1.0), (0.01, 1.0), (0.01, 1.0)])
    assert make_base(base_recipe(), 0, tmp_path) == tmp_path / "round-3" / "model"
