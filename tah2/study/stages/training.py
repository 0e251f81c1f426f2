"""Bases and variants: the trainer's own runs, in this process or started by a command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tah2.config.strict import ConfigError, plain
from tah2.study.layout import BASES, MODEL, STAGES, UNIT, UNITS, UnitInfo
from tah2.study.ledger import digest_model
from tah2.study.plan import Task, Unit, quiet
from tah2.study.plugins import imported
from tah2.study.sources import local_path
from tah2.train.callbacks import Callback
from tah2.train.callbacks.base import Level, Metrics, RunInfo
from tah2.train.config import TrainConfig
from tah2.train.health import NonFiniteLoss
from tah2.train.summary import write_summary

if TYPE_CHECKING:
    from tah2.study.shop import Shop, Tell

BEGUN = "begun.json"
DIVERGED = "diverged"
"""What a run of the search leaves behind whose loss was not finite: no model, so that another rate is taken."""
CHECKPOINTS = "checkpoints"


class Interrupted(Exception):
    """Somebody asked a training to stop; it left a checkpoint."""


def train_base(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    base = shop.plan.bases[task.subject]
    if base.path is not None:
        path = local_path(base.path)
        return base.path if path is None else digest_model(path)
    folder = shop.root / BASES / base.id
    if base.maker is not None:
        made = shop.root / base.made
        _begin(folder, [made], key, "")
        made_model = imported(base.maker)(quiet(base.recipes[0]), base.seed, made)
        assert made_model == shop.root / base.model, "a maker leaves its model in the folder 'model'"
        return digest_model(made_model)
    _begin(folder, [shop.root / base.folder(stage) for stage in range(len(base.recipes))], key, "")
    for stage in range(len(base.recipes)):
        done, count = stage, len(base.recipes)
        _train(shop, shop.base_config(base, stage), lambda share: tell((done + share) / count))  # noqa: B023
    return digest_model(shop.root / base.model)


def train_unit(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    unit = shop.plan.units[task.subject]
    config = shop.config(unit)
    folder = shop.root / unit.folder
    twin = _twin(shop, unit, key)
    if twin is not None:
        shutil.rmtree(config.out, ignore_errors=True)
        shutil.copytree(twin, config.out, copy_function=_link)
    else:
        _begin(folder, [config.out], key, shop.start(unit))
        try:
            _train(shop, config, tell)
        except NonFiniteLoss:
            if unit.group != "search":
                raise
            describe_unit(shop, unit)
            return DIVERGED
    describe_unit(shop, unit)
    return digest_model(config.out / MODEL)


def describe_unit(shop: Shop, unit: Unit) -> None:
    """Write `unit.json`."""
    trained = shop.plan.units[unit.of] if unit.of is not None else unit
    config = shop.config(trained)
    info = UnitInfo(
        id=unit.id,
        variant=unit.variant,
        title=unit.title,
        group=unit.group,
        loop=unit.loop.kind,
        max_depth=trained.ceiling,
        ceiling=unit.ceiling,
        base=unit.base.name,
        base_seed=unit.base.seed,
        seed=unit.seed,
        model=trained.model,
        learning_rate=config.optimizer.learning_rate,
        of=unit.of,
        differs=unit.differs,
        recipe=plain(config),
    )
    write_summary(shop.root / unit.folder / UNIT, plain(info))


def _begin(folder: Path, outs: Iterable[Path], key: str, start: str) -> None:
    """A training that began from other inputs is not gone on with: its folders go."""
    begun = {"key": key, "start": start}
    path = folder / STAGES / BEGUN
    if not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != begun:
        for out in outs:
            shutil.rmtree(out, ignore_errors=True)
    write_summary(path, begun)


def _train(shop: Shop, config: TrainConfig, tell: Tell) -> None:
    command = shop.plan.study.launch.command
    if command:
        _launch(command, config)
    else:
        from tah2.train.trainer import train

        summary = train(config, [Watch(tell)])
        if summary["status"] != "finished":
            raise Interrupted(f"{config.out} stopped at step {summary['step']}.")
    shutil.rmtree(config.out / CHECKPOINTS, ignore_errors=True)


def _launch(command: tuple[str, ...], config: TrainConfig) -> None:
    """The recipe as a file, and the command that trains it."""
    config.out.parent.mkdir(parents=True, exist_ok=True)
    recipe = config.out.parent / f"{config.out.name}.yaml"
    recipe.write_text(yaml.safe_dump(plain(config), sort_keys=False), encoding="utf-8")
    words = [*command, "sft", str(recipe)]
    code = subprocess.run(words, check=False).returncode
    summary = config.out / "summary.json"
    status = json.loads(summary.read_text(encoding="utf-8"))["status"] if summary.is_file() else "failed"
    if status == "interrupted":
        raise Interrupted(f"{config.out} was interrupted.")
    if code or status != "finished":
        raise ConfigError(f"Training failed (exit code {code}): {shlex.join(words)}")


def _twin(shop: Shop, unit: Unit, key: str) -> Path | None:
    """The training folder of another unit that was made from the very same inputs (a run of the search)."""
    for other in shop.plan.units.values():
        if other.id != unit.id and other.of is None and shop.ledger.is_done(shop.plan.tasks[f"train:{other.id}"], key):
            return shop.root / UNITS / other.id / "train"
    return None


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


class Watch(Callback):
    """Passes the trainer's steps on as a share of the run; the study shows them."""

    shows_messages = True
    owns_screen = True

    def __init__(self, tell: Tell) -> None:
        self._tell, self._total = tell, 1

    def on_start(self, run: RunInfo) -> None:
        self._total = run.total_steps or 1

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._tell(step / self._total)

    def on_message(self, level: Level, text: str) -> None:
        """They stand in the run's `metrics.jsonl`."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The stage says how it ended."""
