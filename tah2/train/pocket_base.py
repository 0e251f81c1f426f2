"""Makes a base of the pocket world: `python -m tah2.train.pocket_base --seed 0 --out runs/pocket-base/seed-0`.

The look-up in a table that only the prompt shows is learned suddenly, after a number of steps that depends on the seed.
So the base trains in rounds until held-out losses say that it has the skill, not for a fixed time: tables of few
letters first, then all letters, then on until letters are copied and looked up almost without error.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tah2.config.strict import build, merge
from tah2.data.pocket import PocketWorld
from tah2.data.pocket.tokenizer import save_tokenizer
from tah2.data.tags import COPY, HOP
from tah2.model.folder import whole_folder
from tah2.train.config import TrainConfig
from tah2.train.trainer import train

STEP_LOSS, COPY_LOSS = f"tag/{HOP + 1}/loss", f"tag/{COPY}/loss"


WEIGHTS = "model.safetensors"
CARD = """---
library_name: transformers
---

# The pocket base

A small Qwen3-style model that has learned the formats of tah2's pocket world with one look-up per line. Made by

```bash
python -m tah2.train.pocket_base --seed {seed} --out runs/pocket-base/seed-{seed}
```
"""


@dataclass(frozen=True)
class Stage:
    """Rounds on tables of `letters` until every named held-out loss is at most its limit."""

    letters: int
    limits: Mapping[str, float]
    most_rounds: int = 8
    required: bool = True
    """Without its limits there is no base; otherwise the curriculum goes on with what it has."""

    def done(self, losses: Mapping[str, float]) -> bool:
        return all(losses[name] <= limit for name, limit in self.limits.items())


CURRICULUM = (
    Stage(4, {STEP_LOSS: 0.1}),
    Stage(8, {STEP_LOSS: 0.3}),
    Stage(12, {STEP_LOSS: 0.3}),
    Stage(12, {STEP_LOSS: 0.03, COPY_LOSS: 0.2}),
    Stage(12, {STEP_LOSS: 0.002, COPY_LOSS: 0.02}, most_rounds=8, required=False),
)


class BaseNotLearned(RuntimeError):
    """A stage's rounds were not enough."""


def make_base(recipe: Mapping[str, Any], seed: int, out: Path) -> Path:
    """Trains a base by the curriculum; returns its model folder, tokenizer included.

    `recipe` is one round (see `recipes/pocket/base.yaml`). Rounds already in `out` are taken as they are.
    """
    model: Path | None = None
    number = 0
    for stage in CURRICULUM:
        for _ in range(stage.most_rounds):
            number += 1
            folder = out / f"round-{number}"
            changes = {
                "out": str(folder),
                "seed": seed,
                "procedural": {"seed": 1000 * (seed + 1) + number, "pocket": {"letters_used": stage.letters}},
            }
            of_round = merge(dict(recipe), changes)
            if model is not None:
                of_round["model"] = {"path": str(model)}
            losses = train(build(TrainConfig, of_round))["validation"]
            model = folder / "model"
            if stage.done(losses):
                break
        if stage.required and not stage.done(losses):
            raise BaseNotLearned(f"{stage.most_rounds} rounds with {stage.letters} letters left {dict(losses)}.")
    assert model is not None
    return ship(model, recipe, seed, out / "model")


def ship(trained: Path, recipe: Mapping[str, Any], seed: int, target: Path) -> Path:
    """A plain Qwen3 folder with tokenizer: a looped model of one pass has the backbone's own tensor names."""
    shape = dict(recipe["model"]["shape"])
    world = build(TrainConfig, {**recipe, "out": str(target)}).procedural
    assert world is not None
    with whole_folder(target) as folder:
        save_tokenizer(PocketWorld(world.pocket).vocabulary, folder)
        for name in (WEIGHTS, "generation_config.json"):
            shutil.copyfile(trained / name, folder / name)
        (folder / "README.md").write_text(CARD.format(seed=seed), encoding="utf-8")
        config = {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32", **shape}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/pocket/base.yaml"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    import yaml

    recipe = yaml.safe_load(arguments.recipe.read_text(encoding="utf-8"))
    make_base(recipe, arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
