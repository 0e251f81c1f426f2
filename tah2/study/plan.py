"""From a study to its units and their stages: what there is to do, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, build, merge, suggestion
from tah2.model.kinds import kind_of
from tah2.study.config import StudySection, VariantSection
from tah2.study.layout import BASES, MODEL, TRAIN, UNITS
from tah2.train.config import TrainConfig

STAGES = ("base", "train", "validate", "generate", "grade", "runtime", "analyse", "report")
WHOLE = ("runtime", "analyse", "report")
"""Stages of the study as a whole; the others are of one base or unit."""
ALONE = ("runtime",)
"""Stages that measure time: nothing else runs meanwhile."""


@dataclass(frozen=True)
class BaseUnit:
    """A base of one seed."""

    id: str
    name: str
    seed: int
    recipes: tuple[dict[str, Any], ...]
    """The curriculum, or the maker's one recipe; empty where the base is a checkpoint."""
    path: str | None
    maker: str | None = None

    def folder(self, stage: int) -> str:
        return f"{BASES}/{self.id}/{TRAIN}-{stage}"

    @property
    def made(self) -> str:
        """Where a maker works."""
        return f"{BASES}/{self.id}/made"

    @property
    def model(self) -> str:
        """Relative to the study's folder; for a checkpoint, where it is."""
        if self.path is not None:
            return self.path
        return f"{self.made if self.maker is not None else self.folder(len(self.recipes) - 1)}/{MODEL}"


@dataclass(frozen=True)
class Unit:
    """One variant with its seeds: trained, or a trained one under another ceiling (`of`)."""

    id: str
    variant: str
    title: str
    group: str
    base: BaseUnit
    seed: int
    recipe: dict[str, Any]
    """Whole but for `out`, `model.path` and a learning rate that is yet to be chosen."""
    loop: LoopConfig
    ceiling: int
    after: str | None = None
    """The unit whose model it starts from."""
    of: str | None = None
    candidates: tuple[str, ...] = ()
    """Units of the search; the rate of the one with the lowest validation loss is taken."""
    differs: str = ""
    respond: bool = True

    @property
    def folder(self) -> str:
        return f"{UNITS}/{self.id}"

    @property
    def model(self) -> str:
        return f"{UNITS}/{self.of or self.id}/{TRAIN}/{MODEL}"


@dataclass(frozen=True)
class Task:
    """One stage of one base or unit, or of the study as a whole (`subject` is then empty)."""

    stage: str
    subject: str = ""
    needs: tuple[str, ...] = ()
    """Ids of tasks that come first."""

    @property
    def id(self) -> str:
        return f"{self.stage}:{self.subject}" if self.subject else self.stage


@dataclass(frozen=True)
class Plan:
    study: StudySection
    bases: dict[str, BaseUnit] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    """Every task after those that it needs."""


def plan_study(study: StudySection, variants: Iterable[str] = ()) -> Plan:
    """The whole study, or the part that `variants` (names or patterns) need."""
    bases = {base.id: base for base in _bases(study)}
    units = {unit.id: unit for unit in _units(study, bases)}
    chosen = tuple(variants)
    if chosen:
        units = _needed(study, units, chosen)
        used = {unit.base.id for unit in units.values()}
        bases = {name: base for name, base in bases.items() if name in used}
    return Plan(study, bases, units, {task.id: task for task in _tasks(study, bases, units)})


def _bases(study: StudySection) -> Iterable[BaseUnit]:
    for name, section in study.bases.items():
        for seed in section.seeds:
            recipes = section.stages if section.maker is None else (section.recipe,)
            yield BaseUnit(f"{name}-b{seed}", name, seed, recipes, section.path, section.maker)


def _units(study: StudySection, bases: Mapping[str, BaseUnit]) -> Iterable[Unit]:
    """Searches first, then variants in the study's order; a variant of another shares its seeds."""
    search = study.search
    for name, variant in study.variants.items():
        if variant.search:
            base = bases[f"{_base_name(study, variant)}-b{search.base_seed}"]
            for rate in search.learning_rates:
                unit = _unit(study, name, variant, base, search.seed)
                yield replace(
                    unit,
                    id=f"search-{name}-lr{rate:g}-b{base.seed}-s{search.seed}",
                    group="search",
                    recipe=at_rate(unit.recipe, rate),
                    respond=False,
                )
    for name, variant in study.variants.items():
        base_seeds, seeds = _seeds(study, variant)
        for base_seed in base_seeds:
            base_id = f"{_base_name(study, variant)}-b{base_seed}"
            if base_id not in bases:
                raise ConfigError(f"variants.{name}.base_seeds: its base has no seed {base_seed}.")
            for seed in seeds:
                yield _with_candidates(study, _unit(study, name, variant, bases[base_id], seed), variant)


def _seeds(study: StudySection, variant: VariantSection) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Base and post-training seeds: its own, else those of the variant that it builds on, else all."""
    source = variant.of or variant.after
    if source is None:
        base_seeds, seeds = study.bases[_base_name(study, variant)].seeds, study.seeds
    else:
        base_seeds, seeds = _seeds(study, study.variants[source])
    return variant.base_seeds or base_seeds, variant.seeds or seeds


def _unit(study: StudySection, name: str, variant: VariantSection, base: BaseUnit, seed: int) -> Unit:
    trained = study.variants[variant.of] if variant.of is not None else variant
    recipe = _recipe(study, trained, seed)
    config = build(TrainConfig, merge(recipe, {"out": "unused", "model": {"path": "unused"}}))
    if config.loop is None:
        raise ConfigError(f"variants.{name}: its recipe must say which loop to train ('loop.kind').")
    suffix = f"b{base.seed}-s{seed}"
    return Unit(
        id=f"{name}-{suffix}",
        variant=name,
        title=variant.title,
        group=variant.group,
        base=base,
        seed=seed,
        recipe=recipe,
        loop=config.loop,
        ceiling=kind_of(config.loop).ceiling(config.loop, variant.ceiling),
        after=None if variant.after is None else f"{variant.after}-{suffix}",
        of=None if variant.of is None else f"{variant.of}-{suffix}",
        differs=variant.differs,
        respond=variant.respond,
    )


def _with_candidates(study: StudySection, unit: Unit, variant: VariantSection) -> Unit:
    source = unit.variant if variant.search else variant.rate_of
    if source is None:
        return unit
    search, base = study.search, _base_name(study, study.variants[source])
    assert base in study.bases
    names = (f"search-{source}-lr{rate:g}-b{search.base_seed}-s{search.seed}" for rate in search.learning_rates)
    return replace(unit, candidates=tuple(names))


def _base_name(study: StudySection, variant: VariantSection) -> str:
    if variant.of is not None:
        return _base_name(study, study.variants[variant.of])
    return variant.base or next(iter(study.bases))


def _recipe(study: StudySection, variant: VariantSection, seed: int) -> dict[str, Any]:
    """What a unit's training is told, with the seeds of its sample order, start and data."""
    recipe = merge(merge(study.recipe, variant.recipe), {"seed": seed})
    if recipe.get("procedural") is not None:
        recipe = merge(recipe, {"procedural": {"seed": seed}})
    if study.data is not None:
        recipe = merge(recipe, {"data": {"sources": [{"path": str(study.data)}]}})
    return recipe


def at_rate(recipe: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The recipe at another learning rate; the gate's keeps its ratio to it."""
    optimizer: dict[str, Any] = dict(recipe.get("optimizer") or {})
    gate = optimizer.get("gate_learning_rate")
    changed: dict[str, Any] = {"learning_rate": rate}
    if gate is not None:
        ratio = float(gate) / learning_rate(recipe)
        changed["gate_learning_rate"] = rate * ratio
    return merge(recipe, {"optimizer": changed})


def quiet(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Without loggers of its own: the study shows progress, and the trainer's JSON lines are always written."""
    return merge({"logging": {"loggers": []}}, recipe)


def learning_rate(recipe: Mapping[str, Any]) -> float:
    from tah2.train.config import OptimizerSection

    return float((recipe.get("optimizer") or {}).get("learning_rate", OptimizerSection.learning_rate))


def _needed(study: StudySection, units: Mapping[str, Unit], chosen: tuple[str, ...]) -> dict[str, Unit]:
    """The units of the chosen variants and all that they depend on."""
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in study.variants):
            raise ConfigError(f"No variant is called {pattern!r}{suggestion(pattern, study.variants)}.")
    wanted = {unit.id for unit in units.values() if unit.group != "search" and _matches(unit.variant, chosen)}
    grown: set[str] = set()
    while wanted != grown:
        grown = set(wanted)
        for name in grown:
            unit = units[name]
            wanted.update(other for other in (unit.after, unit.of, *unit.candidates) if other is not None)
    return {name: unit for name, unit in units.items() if name in wanted}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tasks(study: StudySection, bases: Mapping[str, BaseUnit], units: Mapping[str, Unit]) -> Iterable[Task]:
    responding, begun = [], set[str]()
    for unit in _in_order(units):
        if unit.base.id not in begun:
            begun.add(unit.base.id)
            yield Task("base", unit.base.id)
        if unit.of is None:
            needs = [f"base:{unit.base.id}", *(f"validate:{name}" for name in unit.candidates)]
            needs += [f"train:{unit.after}"] if unit.after is not None else []
            yield Task("train", unit.id, tuple(needs))
        trained = f"train:{unit.of or unit.id}"
        yield Task("validate", unit.id, (trained,))
        if unit.respond and (study.generate.problems or study.evaluate.tasks):
            yield Task("generate", unit.id, (trained,))
            yield Task("grade", unit.id, (f"generate:{unit.id}",))
            responding.append(f"grade:{unit.id}")
    validated = [f"validate:{name}" for name in units]
    timed = timed_units(study, units)
    runtime = ("runtime",) if timed else ()
    if timed:
        yield Task("runtime", needs=tuple(f"train:{unit.of or unit.id}" for unit in timed))
    yield Task("analyse", needs=(*validated, *responding, *runtime))  # the summary judges runtime too
    yield Task("report", needs=("analyse", *runtime))


def timed_units(study: StudySection, units: Mapping[str, Unit]) -> list[Unit]:
    """One unit of each variant whose runtime is measured: its first, the search's apart."""
    firsts: dict[str, Unit] = {}
    for unit in units.values():
        if unit.group != "search":
            firsts.setdefault(unit.variant, unit)
    return [firsts[name] for name in study.runtime.variants if name in firsts]


def _in_order(units: Mapping[str, Unit]) -> list[Unit]:
    """Units after those that they start from; otherwise as the study names them."""
    placed: dict[str, Unit] = {}

    def place(unit: Unit) -> None:
        for name in (*unit.candidates, unit.after, unit.of):
            if name is not None and name not in placed:
                if name not in units:
                    raise ConfigError(
                        f"{unit.id} needs {name}, which the study does not run: give both the same seeds."
                    )
                place(units[name])
        placed.setdefault(unit.id, unit)

    for unit in units.values():
        place(unit)
    return list(placed.values())
