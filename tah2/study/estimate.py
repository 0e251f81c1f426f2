"""What a plan will cost: FLOPs from the accounting, seconds from speeds that the study states.

A run corrects the seconds by what its finished stages really took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tah2.compute import TrainFlops, decode_per_token, train_flops
from tah2.compute.train import routes_in_training
from tah2.config.backbone import BackboneConfig, preset
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, build, merge, read_mapping
from tah2.data.budget import BudgetConfig, DataSize, resolve_steps
from tah2.data.config import BatchConfig
from tah2.data.procedural import ProceduralConfig
from tah2.data.store import TokenStore
from tah2.model.kinds import kind_of
from tah2.study.config import EstimateSection, StudySection
from tah2.study.plan import BaseUnit, Plan, Task, Unit
from tah2.study.sources import local_path
from tah2.train.schemes import SCHEMES

SAMPLED = 64
"""Documents that are drawn to learn how long they are."""


@dataclass(frozen=True)
class Cost:
    flops: float
    seconds: float


@dataclass(frozen=True)
class Reading:
    """How much a training reads."""

    tokens: float
    mean_keys: float
    """Mean position of a token in its document."""


def estimate(plan: Plan) -> dict[str, Cost]:
    """The cost of every task."""
    study = plan.study
    costs = {}
    for task in plan.tasks.values():
        costs[task.id] = _cost(plan, task, study.estimate)
    return costs


def _cost(plan: Plan, task: Task, assumed: EstimateSection) -> Cost:
    study = plan.study
    if task.stage == "base":
        base = plan.bases[task.subject]
        if base.maker is not None:
            return Cost(assumed.base_seconds * assumed.train_flops_per_second, assumed.base_seconds)
        flops = sum(_base_flops(study, base, recipe) for recipe in base.recipes)
        return Cost(flops, flops / assumed.train_flops_per_second + assumed.unit_seconds * len(base.recipes))
    if task.stage == "runtime":
        return Cost(0.0, 5.0 * assumed.unit_seconds)
    if task.stage in ("analyse", "report"):
        return Cost(0.0, assumed.unit_seconds)
    unit = plan.units[task.subject]
    if task.stage == "train":
        found = unit_flops(study, unit)
        flops = 0.0 if found is None else float(found.total_actual)
        return Cost(flops, flops / assumed.train_flops_per_second + assumed.unit_seconds)
    if task.stage == "validate":
        flops = _validation_flops(study, unit)
        return Cost(flops, flops / assumed.train_flops_per_second + assumed.unit_seconds)
    if task.stage == "generate":
        flops = _response_flops(study, unit)
        return Cost(flops, flops / assumed.decode_flops_per_second + assumed.unit_seconds)
    return Cost(0.0, assumed.unit_seconds)


def unit_flops(study: StudySection, unit: Unit) -> TrainFlops | None:
    """Training FLOPs by the accounting; None where neither data nor study say how much is read."""
    backbone, read = backbone_of(unit.recipe, unit.base), reading(study, unit.recipe, unit.base)
    if backbone is None or read is None:
        return None
    shares = continue_fractions(study, unit)
    found = train_flops(backbone, unit.loop, shares, read.mean_keys, read.tokens)
    return replace(found, forward_backward=found.forward_backward / 3) if trains_gate_alone(unit) else found


def trains_gate_alone(unit: Unit) -> bool:
    """Behind a frozen backbone there is no backward pass worth counting."""
    scheme = (unit.recipe.get("objective") or {}).get("scheme") or kind_of(unit.loop).training
    return SCHEMES[scheme]().freezes_backbone


def continue_fractions(study: StudySection, unit: Unit) -> tuple[float, ...]:
    """Share of all tokens that reach depths 2..M in training: the study's, else geometric; none where all do."""
    if not routes_in_training(kind_of(unit.loop)):
        return ()
    stated = study.estimate.continue_fractions.get(unit.variant)
    if stated is not None:
        return stated
    return tuple(study.estimate.continue_share**m for m in range(1, kind_of(unit.loop).ceiling(unit.loop)))


def reading(study: StudySection, recipe: Mapping[str, Any], base: BaseUnit) -> Reading | None:
    """Tokens and mean keys of a training, from its data where they are procedural, else as the study states.

    Stated tokens are the baseline's.
    """
    stated = study.estimate
    batch = build(BatchConfig, recipe.get("batch") or {})
    budget = build(BudgetConfig, recipe.get("budget") or {})
    if recipe.get("procedural") is None:
        if stated.mean_keys is None:
            return None
        if stated.tokens is not None:
            return Reading(stated.tokens * _share_of_budget(study, budget), stated.mean_keys)
        backbone = backbone_of(recipe, base)
        if budget.tokens_per_parameter is None or backbone is None:
            return None
        from tah2.compute import parameter_counts

        count = parameter_counts(backbone, LoopConfig("standard")).backbone
        return Reading(budget.tokens_per_parameter * count, stated.mean_keys)
    lengths, samples = _lengths(repr(sorted(recipe["procedural"].items())), _procedural(recipe["procedural"]))
    size = DataSize(float(lengths.mean()), samples)
    steps = resolve_steps(budget, size, batch.samples)
    positions = float((lengths * (lengths + 1) / 2).sum() / lengths.sum())
    return Reading(steps * batch.samples * float(lengths.mean()), positions)


def _share_of_budget(study: StudySection, budget: BudgetConfig) -> float:
    """A unit of another number of epochs or steps than the baseline reads in proportion."""
    recipe = merge(study.recipe, study.variants[study.baseline].recipe)
    common = build(BudgetConfig, recipe.get("budget") or {})
    for mine, its in ((budget.epochs, common.epochs), (budget.steps, common.steps)):
        if mine and its:
            return mine / its
    return 1.0


def _procedural(section: Mapping[str, Any]) -> ProceduralConfig:
    return build(ProceduralConfig, section)


_KNOWN: dict[str, np.ndarray[Any, Any]] = {}


def _lengths(name: str, config: ProceduralConfig) -> tuple[np.ndarray[Any, Any], int]:
    if name not in _KNOWN:
        store: TokenStore = config.build_task().generate(SAMPLED, 0, "train")
        _KNOWN[name] = store.lengths.astype(np.float64)
    return _KNOWN[name], config.samples


def _base_flops(study: StudySection, base: BaseUnit, recipe: Mapping[str, Any]) -> float:
    backbone = backbone_of(merge(base.recipes[0], recipe), base)
    if backbone is None:
        return 0.0
    read = reading(study, recipe, base)
    return (
        0.0
        if read is None
        else float(train_flops(backbone, LoopConfig("standard"), (), read.mean_keys, read.tokens).total_actual)
    )


def _validation_flops(study: StudySection, unit: Unit) -> float:
    """Forward alone, at the depth that is assumed of training."""
    found, read = unit_flops(study, unit), reading(study, unit.recipe, unit.base)
    if found is None or read is None or unit.recipe.get("procedural") is None:
        return 0.0
    lengths, _ = _lengths(repr(sorted(unit.recipe["procedural"].items())), _procedural(unit.recipe["procedural"]))
    share = study.validate.samples * float(lengths.mean()) / read.tokens
    return float(found.forward_backward) / 3 * share


def _response_flops(study: StudySection, unit: Unit) -> float:
    """Responses of half the token limit."""
    backbone, responses = backbone_of(unit.recipe, unit.base), responses_asked(study)
    if backbone is None or not responses:
        return 0.0
    kind = kind_of(unit.loop)
    shares: tuple[float, ...] = ()
    if kind.gate is not None:
        assumed = study.estimate.continue_share
        shares = tuple(assumed**m for m in range(1, kind.ceiling(unit.loop, unit.ceiling)))
    tokens = study.generate.max_tokens / 2
    each = decode_per_token(backbone, unit.loop, shares, 1 + tokens, unit.ceiling).total
    return float(each) * responses * tokens


def responses_asked(study: StudySection) -> int:
    """Of one unit: to the world's problems, or to the benchmarks with their own numbers of repeats."""
    if not study.evaluate.tasks:
        return study.generate.problems * study.generate.samples
    from tah2.evals.tasks import task_named

    tasks = [task_named(name) for name in study.evaluate.tasks]
    return sum(task.count * task.repeats for task in tasks)


def backbone_of(recipe: Mapping[str, Any], base: BaseUnit) -> BackboneConfig | None:
    """The shape of what is trained: stated, of a preset's name, or in the checkpoint's config."""
    for stage in base.recipes:
        shape = (stage.get("model") or {}).get("shape")
        if shape is not None:
            return BackboneConfig.from_hf(shape)
    return None if base.path is None else _shape_at(base.path)


@lru_cache(maxsize=64)
def _shape_at(name: str) -> BackboneConfig | None:
    path = local_path(name)
    if path is not None and (path / "config.json").is_file():
        config = read_mapping(path / "config.json")
        return BackboneConfig.from_hf(config.get("backbone") or config)
    stem = name.rpartition("/")[2].lower()
    for known in (stem, "-".join(stem.split(".")[0].split("-")[:2])):
        try:
            return preset(known)
        except ConfigError:
            continue
    return None
