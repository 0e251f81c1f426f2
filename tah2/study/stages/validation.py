"""Losses and depths on one validation set for all, along the routes that inference takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tah2.data.batches import evaluation_batches
from tah2.data.store import TokenStore
from tah2.study.layout import VALIDATE
from tah2.study.ledger import digest_files
from tah2.study.plan import Task, Unit
from tah2.study.stages.training import DIVERGED, describe_unit
from tah2.study.world import open_world
from tah2.train.config import TrainConfig
from tah2.train.summary import write_summary

if TYPE_CHECKING:
    from tah2.study.shop import Shop, Tell

PIECES = 8
"""Parts in which the set is scored, so that progress shows."""


def validate_unit(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    from tah2.model.checkpoint import load
    from tah2.model.loop import LoopSettings
    from tah2.train.validate import validate

    unit = shop.plan.units[task.subject]
    path = shop.root / unit.folder / VALIDATE
    if shop.produced(f"train:{unit.of or unit.id}") == DIVERGED:
        return _close(path, {"loss": None})
    config = shop.config(shop.plan.units[unit.of] if unit.of is not None else unit)
    if config.system.threads is not None:
        torch.set_num_threads(config.system.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = load(shop.root / unit.model, dtype=torch.float32, device=device).model
    batches = evaluation_batches(held_out(shop, unit, config), config.batch.tokens_per_micro_batch)
    settings = LoopSettings(attention=config.system.attention, max_depth=unit.ceiling)
    tell(0.2)
    metrics = validate(decoder, batches, settings, device, lambda tensor: tensor)
    describe_unit(shop, unit)
    if not math.isfinite(metrics["loss"]):
        if unit.group != "search":
            raise ValueError(f"The validation loss of {unit.id} is not finite; look at its training log.")
        return _close(path, {"loss": None})
    return _close(path, metrics)


def _close(path: Path, metrics: Mapping[str, float | None]) -> str:
    write_summary(path, metrics)
    return digest_files([path])


def held_out(shop: Shop, unit: Unit, config: TrainConfig) -> TokenStore:
    """The study's validation documents."""
    section = shop.plan.study.validate
    if config.procedural is not None:
        return open_world(config.procedural).validation(section.samples, section.seed)
    from transformers import AutoTokenizer

    from tah2.data.dataset import load_data

    assert config.data is not None
    store = load_data(config.data, AutoTokenizer.from_pretrained(shop.root / unit.model)).validation
    return store.select(range(min(section.samples, len(store))))
