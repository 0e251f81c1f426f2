"""The workshop: what each stage of each unit reads (its key) and which function does it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError, build, merge, plain
from tah2.study.layout import TRAIN, VALIDATE
from tah2.study.ledger import Ledger, digest_data, digest_model, key_of
from tah2.study.plan import WHOLE, BaseUnit, Plan, Task, Unit, at_rate, learning_rate, quiet
from tah2.study.sources import local_path
from tah2.train.config import TrainConfig

Tell = Callable[[float], None]
"""Told the share of the stage that is done."""

SETTINGS = ("out", "logging", "checkpoint", "system")
"""Sections of a recipe that change no result, but for the precision (`essential`)."""


READING = ("batch", "cutoffs", "fit_to")
"""Settings of `generate` that change no response."""


class NotReady(ConfigError):
    """A stage whose inputs are missing."""


@dataclass(frozen=True)
class Shop:
    """A plan and the folder in which it is carried out. Everything that it knows is on the disk."""

    root: Path
    plan: Plan
    command: str = "tah2 study"
    """As it was typed, for the report."""

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.root)

    def key(self, task: Task) -> str:
        """What the stage would be made from now; refuses where something that it needs is not there."""
        return key_of(task.stage, self.inputs(task))

    def inputs(self, task: Task) -> dict[str, Any]:
        if task.stage in WHOLE:
            return self._inputs_of_whole(task)
        if task.stage == "base":
            return self._inputs_of_base(self.plan.bases[task.subject])
        study, unit = self.plan.study, self.plan.units[task.subject]
        if task.stage == "train":
            config = self.config(unit)
            return {"start": self._start(unit), "recipe": essential(config), "data": contents(config)}
        trained = {"model": self.produced(f"train:{unit.of or unit.id}"), "ceiling": unit.ceiling}
        if task.stage == "validate":
            data = {name: unit.recipe.get(name) for name in ("data", "procedural")}
            return {**trained, "validate": plain(study.validate), "data": data, "contents": contents(self.config(unit))}
        if task.stage == "generate":
            asked = {name: value for name, value in plain(study.generate).items() if name not in READING}
            return {**trained, "world": unit.recipe.get("procedural"), "generate": asked, "eval": plain(study.evaluate)}
        return {
            "records": self.produced(f"generate:{unit.id}"),
            "loop": plain(unit.loop),
            "ceiling": unit.ceiling,
            "world": unit.recipe.get("procedural"),
            "cutoffs": study.generate.cutoffs,
        }

    def _inputs_of_base(self, base: BaseUnit) -> dict[str, Any]:
        if base.maker is not None:
            kept = {name: value for name, value in base.recipes[0].items() if name not in SETTINGS}
            return {"maker": base.maker, "recipe": kept, "seed": base.seed}
        if base.path is None:
            return {"recipes": [essential(self.base_config(base, stage)) for stage in range(len(base.recipes))]}
        path = local_path(base.path)
        return {"checkpoint": base.path if path is None else digest_model(path)}

    def _inputs_of_whole(self, task: Task) -> dict[str, Any]:
        study = self.plan.study
        inputs = {name: self.produced(name) for name in task.needs}
        if task.stage == "runtime":
            return {**inputs, "runtime": plain(study.runtime), "generate": plain(study.generate)}
        from tah2.study.plugins import version_of

        return {**inputs, "study": plain(study), "code": version_of(task.stage)}

    def _start(self, unit: Unit) -> str:
        return self.produced(f"base:{unit.base.id}" if unit.after is None else f"train:{unit.after}")

    def produced(self, name: str) -> str:
        """The digest of what the task `name` left behind."""
        output = self.ledger.output(self.plan.tasks[name])
        if output is None:
            raise NotReady(f"{name} has not run: let the study run that stage first (without --only).")
        return output

    def base_config(self, base: BaseUnit, stage: int) -> TrainConfig:
        recipe = merge(base.recipes[stage], {"seed": base.seed, "out": str(self.root / base.folder(stage))})
        if recipe.get("procedural") is not None:
            recipe = merge(recipe, {"procedural": {"seed": base.seed}})
        if stage:
            model = {key: value for key, value in (recipe.get("model") or {}).items() if key != "shape"}
            recipe["model"] = {**model, "path": str(self.root / base.folder(stage - 1) / "model")}
        return build(TrainConfig, quiet(recipe))

    def config(self, unit: Unit) -> TrainConfig:
        """The whole recipe of a unit's training, its learning rate chosen."""
        return build(TrainConfig, self.recipe(unit))

    def recipe(self, unit: Unit) -> dict[str, Any]:
        recipe = at_rate(unit.recipe, self.chosen_rate(unit)) if unit.candidates else unit.recipe
        return quiet(merge(recipe, {"out": str(self.root / unit.folder / TRAIN), "model": {"path": self.start(unit)}}))

    def start(self, unit: Unit) -> str:
        """The model that the unit's training starts from, as a path for the trainer."""
        if unit.after is not None:
            return str(self.root / self.plan.units[unit.after].model)
        if unit.base.path is None:
            return str(self.root / unit.base.model)
        path = local_path(unit.base.path)
        return unit.base.path if path is None else str(path)

    def chosen_rate(self, unit: Unit) -> float:
        """The learning rate of the search's run with the lowest validation loss (the lower rate if they tie)."""
        losses = []
        for name in unit.candidates:
            self.produced(f"validate:{name}")
            found = json.loads((self.root / self.plan.units[name].folder / VALIDATE).read_text(encoding="utf-8"))
            if found["loss"] is not None:  # it is where the run diverged
                losses.append((found["loss"], learning_rate(self.plan.units[name].recipe)))
        if not losses:
            raise ConfigError(f"{unit.id}: every run of its search diverged; give 'search.learning_rates' lower rates.")
        return min(losses)[1]

    def run(self, task: Task, key: str, tell: Tell) -> None:
        """Do the stage and mark it done."""
        from transformers.utils.logging import disable_progress_bar

        from tah2.study.stages import STAGE_FUNCTIONS

        disable_progress_bar()  # the study shows its own
        started = time.monotonic()
        output = STAGE_FUNCTIONS[task.stage](self, task, key, tell)
        self.ledger.close(task, key, output, time.monotonic() - started)


def essential(config: TrainConfig) -> dict[str, Any]:
    """What decides the result of a training: the recipe without where it is written and how it is shown.

    The model is left out, as its content is known by a digest.
    """
    kept = {name: value for name, value in plain(config).items() if name not in SETTINGS}
    kept["model"] = {name: value for name, value in kept["model"].items() if name != "path"}
    return {**kept, "precision": config.system.precision}


def contents(config: TrainConfig) -> list[str]:
    """Digests of the local files that a training reads."""
    if config.data is None:
        return []
    from tah2.data.sources import local_files

    sources = [*config.data.sources, *config.data.validation_sources]
    try:
        return [digest_data(local_files(source.path)) for source in sources if source.path]
    except ConfigError as problem:
        raise NotReady(str(problem)) from None
