"""A study as data: variants x seeds, what they share, and how they are compared.

    title: ...
    recipe: {extends: ../pocket/post.yaml}     # what every variant's training shares
    bases: {pocket: {stages: [{extends: ...}], seeds: [0, 1, 2]}}
    baseline: standard
    variants:
      standard: {title: Standard, recipe: {loop: {kind: standard}}}
      tah2-m2: {title: TaH2 M=2, recipe: {loop: {kind: tah2, max_depth: 2}}}

Every `recipe` may extend recipe files; paths are relative to the study's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from tah2.config.recipe import EXTENDS, load_recipe
from tah2.config.strict import ConfigError, build, merge, suggestion

GROUPS = ("main", "ablation", "ours", "budget", "size", "ceiling")
Group = Literal["main", "ablation", "ours", "budget", "size", "ceiling"]


@dataclass(frozen=True)
class BaseSection:
    """Where variants start: a checkpoint that exists, or what makes one per seed."""

    path: str | None = None
    """A folder, hub id or GGUF file; `package:NAME/FILE` is a file inside an installed Python package."""
    stages: tuple[dict[str, Any], ...] = ()
    """Recipes; each starts from the model that the one before it made. `seed` is the base's."""
    maker: str | None = None
    """`module:function` that makes a base from (recipe, seed, folder), and returns its model's folder."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """For the maker."""
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if sum((self.path is not None, bool(self.stages), self.maker is not None)) != 1:
            raise ConfigError(
                "Give a base exactly one of 'path' (a checkpoint), 'stages' (recipes that make it) and 'maker'."
            )
        if self.maker is not None and self.maker.count(":") != 1:
            raise ConfigError(f"'maker' names a function as 'module:function', not {self.maker!r}.")
        if self.recipe and self.maker is None:
            raise ConfigError("A base's 'recipe' is for its 'maker'; give recipes of a curriculum as 'stages'.")
        if not self.seeds:
            raise ConfigError("A base needs at least one seed.")
        if self.path is not None and len(self.seeds) > 1:
            raise ConfigError("A base that is a checkpoint has one seed; several need something that makes them.")


@dataclass(frozen=True)
class VariantSection:
    """One row of the tables."""

    title: str
    group: Group = "main"
    recipe: dict[str, Any] = field(default_factory=dict)
    """Over the study's recipe (see `load_study`)."""
    base: str | None = None
    """Which of the bases; by default the first."""
    after: str | None = None
    """Starts from that variant's trained model of the same seeds (a second stage of training)."""
    of: str | None = None
    """Is not trained: it is that variant's model under another inference `ceiling`."""
    ceiling: int | None = None
    search: bool = False
    """Choose its learning rate among the study's."""
    rate_of: str | None = None
    """Takes the learning rate that was chosen for that variant."""
    seeds: tuple[int, ...] | None = None
    """Of post-training; by default the study's."""
    base_seeds: tuple[int, ...] | None = None
    """By default all of its base's."""
    differs: str = ""
    """What an ablation changes, in words."""
    respond: bool = True
    """Generate responses; without them it has a validation loss alone."""

    def __post_init__(self) -> None:
        if (self.of is None) != (self.ceiling is None):
            raise ConfigError("'of' and 'ceiling' go together: a trained variant under another inference ceiling.")
        if self.of is not None and (self.recipe or self.search or self.rate_of or self.after):
            raise ConfigError("A variant 'of' another is not trained: leave recipe, search, rate_of and after out.")
        if self.search and self.rate_of:
            raise ConfigError("Either search the learning rate or take the one of another variant ('rate_of').")


@dataclass(frozen=True)
class SearchSection:
    """The same search for every variant that asks for it: one run per rate, the lowest validation loss wins."""

    learning_rates: tuple[float, ...] = ()
    base_seed: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if any(rate <= 0 for rate in self.learning_rates) or len(set(self.learning_rates)) < len(self.learning_rates):
            raise ConfigError("'search.learning_rates' are distinct positive numbers.")


@dataclass(frozen=True)
class ValidateSection:
    samples: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class GenerateSection:
    """Responses to the world's test problems; none where `problems` is 0."""

    problems: int = 0
    samples: int = 1
    """Responses per problem."""
    seed: int = 0
    max_tokens: int = 128
    cutoffs: tuple[int, ...] = ()
    """Output-token cutoffs of the scaling curves; `max_tokens` is always one of them."""
    fit_to: int | None = None
    """Slopes are fitted over the cutoffs up to this one, where models were trained; over all by default."""
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    batch: int = 64
    """Requests that run together."""

    def __post_init__(self) -> None:
        if self.problems < 0 or min(self.samples, self.max_tokens, self.batch) < 1:
            raise ConfigError("'generate' needs problems >= 0, and at least one sample, token and request.")
        if any(not 1 <= cutoff <= self.max_tokens for cutoff in self.cutoffs):
            raise ConfigError(f"Cutoffs lie between 1 and max_tokens ({self.max_tokens}).")
        object.__setattr__(self, "cutoffs", tuple(sorted({*self.cutoffs, self.max_tokens})))
        if self.fit_to is not None and sum(cutoff <= self.fit_to for cutoff in self.cutoffs) < 2:
            raise ConfigError(f"'fit_to' ({self.fit_to}) leaves fewer than two cutoffs to fit a slope over.")


@dataclass(frozen=True)
class RuntimeSection:
    """Latency and tokens per second, side by side in rounds."""

    variants: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 4)
    problems: int = 8
    rounds: int = 3


@dataclass(frozen=True)
class EstimateSection:
    """What a plan assumes; a run corrects its own estimate as it goes."""

    train_flops_per_second: float = 2.5e10
    decode_flops_per_second: float = 2e9
    unit_seconds: float = 1.0
    """What a unit costs beside that."""
    tokens: float | None = None
    """Training tokens of the baseline, where the data cannot be asked."""
    mean_keys: float | None = None
    """Mean position of a training token in its document, where the data cannot be asked."""
    continue_fractions: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Share of all tokens that reach depths 2, 3, ... in training; variant -> shares."""
    continue_share: float = 0.2
    """Of the tokens of one depth, those that a decider is assumed to send on, where nothing is known."""
    base_seconds: float = 240.0
    """For a base that a maker makes."""
    published: bool = False
    """Set the paper's training FLOPs beside the plan's."""


@dataclass(frozen=True)
class LaunchSection:
    """Training by a command instead of in this process: `command` followed by `sft RECIPE out=...`."""

    command: tuple[str, ...] = ()
    """Such as [torchrun, --nproc-per-node, 8, -m, tah2]."""


@dataclass(frozen=True)
class EvaluateSection:
    """Responses to public benchmarks through `tah2 eval` instead of the world's problems."""

    command: tuple[str, ...] = ("tah2", "eval")
    tasks: tuple[str, ...] = ()
    data_dir: Path | None = None
    """A folder with local copies of the benchmarks."""
    options: tuple[str, ...] = ()
    """Further words of the command, such as [--limit, 20]."""
    workers: int = 2
    """Responses judged at a time."""


@dataclass(frozen=True)
class StudySection:
    """A whole study."""

    title: str
    variants: dict[str, VariantSection]
    bases: dict[str, BaseSection]
    baseline: str
    about: str = ""
    """What it is and what it can show, in a sentence or two for the report."""
    main: str | None = None
    """The variant that the claims are about; by default the first TaH2 of the main group."""
    recipe: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    """Of post-training, inside each base seed."""
    data: Path | None = None
    """A file or folder of conversations that every variant trains on, instead of the recipe's sources."""
    search: SearchSection = field(default_factory=SearchSection)
    validate: ValidateSection = field(default_factory=ValidateSection)
    generate: GenerateSection = field(default_factory=GenerateSection)
    runtime: RuntimeSection = field(default_factory=RuntimeSection)
    estimate: EstimateSection = field(default_factory=EstimateSection)
    launch: LaunchSection = field(default_factory=LaunchSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    picture: bool = False
    """Show a response coloured by depth at the end."""
    next: tuple[str, ...] = ()
    """What to try when it is done."""

    def __post_init__(self) -> None:
        if not self.variants or not self.bases or not self.seeds:
            raise ConfigError("A study needs at least one variant, base and seed.")
        self._refer("baseline", self.baseline)
        if self.main is not None:
            self._refer("main", self.main)
        for name in self.runtime.variants:
            self._refer("runtime.variants", name)
        for name, variant in self.variants.items():
            for key in ("after", "of", "rate_of"):
                other = getattr(variant, key)
                if other is not None:
                    self._refer(f"variants.{name}.{key}", other)
            self._refuse_circle(name)
            if variant.base is not None and variant.base not in self.bases:
                raise ConfigError(
                    f"variants.{name}.base: unknown base {variant.base!r}{suggestion(variant.base, self.bases)}."
                )
            if variant.rate_of is not None and not self.variants[variant.rate_of].search:
                raise ConfigError(f"variants.{name}.rate_of: {variant.rate_of!r} does not search ('search: true').")
            if variant.search and not self.search.learning_rates:
                raise ConfigError(f"variants.{name} searches, but 'search.learning_rates' is empty.")

    def _refuse_circle(self, name: str) -> None:
        """Follow what `name` builds on, which ends."""
        chain = [name]
        while (source := self.variants[chain[-1]].of or self.variants[chain[-1]].after) is not None:
            self._refer(f"variants.{chain[-1]}", source)
            chain.append(source)
            if source in chain[:-1]:
                raise ConfigError(f"Variants build on each other in a circle: {' -> '.join(chain)}.")

    def _refer(self, where: str, name: str) -> None:
        if name not in self.variants:
            raise ConfigError(f"{where}: unknown variant {name!r}{suggestion(name, self.variants)}.")


def load_study(path: str | Path, overrides: Mapping[str, Any] | None = None) -> StudySection:
    """The study at `path` with `overrides` on top; recipes that it extends are read from beside it.

    A variant's recipe is, from the bottom: the files that the study's recipe extends, those that its own extends, the
    study's own keys, its own keys. So what the study says of all variants holds over the files.
    """
    folder = Path(path).parent
    raw = merge(load_recipe(path), overrides or {})
    shared_files, shared = _layers(raw.get("recipe", {}), folder)
    raw["recipe"] = merge(shared_files, shared)
    for name, variant in dict(raw.get("variants", {})).items():
        if isinstance(variant, Mapping) and "of" not in variant:
            files, own = _layers(variant.get("recipe", {}), folder)
            whole: dict[str, Any] = reduce(merge, (shared_files, files, shared, own), {})
            raw["variants"][name] = {**variant, "recipe": whole}
    for name, base in dict(raw.get("bases", {})).items():
        if isinstance(base, Mapping):
            stages = [composed(stage, folder) for stage in base.get("stages") or []]
            raw["bases"][name] = {**base, "stages": stages, "recipe": composed(base.get("recipe", {}), folder)}
    return build(StudySection, raw)


def _layers(recipe: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The files that `recipe` extends as one mapping, and its own keys."""
    if not isinstance(recipe, Mapping):
        raise ConfigError(f"A recipe must be a mapping of names to values, not {recipe!r}.")
    own = dict(recipe)
    parents = own.pop(EXTENDS, [])
    parents = [parents] if isinstance(parents, str) else list(parents)
    return reduce(merge, (load_recipe(folder / parent) for parent in parents), {}), own


def composed(recipe: Any, folder: Path) -> dict[str, Any]:
    """`recipe` over the files that it extends."""
    return merge(*_layers(recipe, folder))
