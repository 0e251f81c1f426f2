"""A training run as data: everything a recipe may say. Sections mirror the rooms that they configure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.data.budget import BudgetConfig
from tah2.data.config import BatchConfig, DataConfig
from tah2.data.procedural import ProceduralConfig
from tah2.model.kinds import kind_of
from tah2.model.start import StartConfig
from tah2.objective.labels import label_scheme, weight_scheme
from tah2.train.callbacks.table import check_loggers
from tah2.train.lora import LoraConfig

TAGS = 256
"""Kinds of tokens that data may tell apart."""


@dataclass(frozen=True)
class ModelSection:
    """What is post-trained: a pretrained or looped checkpoint, or a random backbone of a given shape."""

    path: str | None = None
    """A local folder, hub id or GGUF file; a looped checkpoint keeps its parts."""
    shape: dict[str, Any] | None = None
    """A Hugging Face config (with `model_type`) to start from random weights instead."""
    start: StartConfig = field(default_factory=StartConfig)
    """How a learned updater begins, fitted on the training data; a checkpoint that has one keeps it."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.shape is None):
            raise ConfigError("Name what to train: either 'model.path' (a checkpoint) or 'model.shape' (a config).")
        if self.start.text is not None:
            raise ConfigError("'model.start.text' is for conversion; training fits the start on its own data.")


@dataclass(frozen=True)
class OptimizerSection:
    learning_rate: float = 4e-5
    gate_learning_rate: float | None = None
    """Learning rate of the decider or exit gate; the backbone's by default."""
    minimum_ratio: float = 0.1
    """The cosine ends at this fraction of the learning rate."""
    warmup_ratio: float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ConfigError(f"The learning rate must be positive, not {self.learning_rate}.")
        if self.gate_learning_rate is not None and self.gate_learning_rate <= 0:
            raise ConfigError(f"'gate_learning_rate' must be positive, not {self.gate_learning_rate}.")
        if not 0 <= self.minimum_ratio <= 1 or not 0 <= self.warmup_ratio < 1:
            raise ConfigError("'minimum_ratio' lies in [0, 1] and 'warmup_ratio' in [0, 1).")
        if not all(0 <= beta < 1 for beta in self.betas) or self.epsilon <= 0 or self.weight_decay < 0:
            raise ConfigError("'betas' lie in [0, 1), 'epsilon' is positive and 'weight_decay' not negative.")
        if self.max_gradient_norm <= 0:
            raise ConfigError(f"'max_gradient_norm' must be positive, not {self.max_gradient_norm}.")


@dataclass(frozen=True)
class ObjectiveSection:
    """The paper's objective; the ablations are other values of these fields."""

    scheme: str | None = None
    """A name in `tah2.train.schemes`; by default the one that the loop kind names."""
    coverage: float = 0.99
    """rho: the share of all positive gain that continue labels keep."""
    decider_coefficient: float = 0.05
    """alpha_D"""
    labels: str = "iteration-gain"
    weights: str = "cost-sensitive"
    decisions: Literal["threshold", "sampled"] = "threshold"
    continue_all_ratio: float = 0.0
    """In this first part of the steps every token continues to the ceiling."""
    tag_weights: dict[str, float] = field(default_factory=dict)
    """Loss weights by kind of token, for data that tells kinds apart (procedural tasks)."""

    def __post_init__(self) -> None:
        if not 0 < self.coverage <= 1:
            raise ConfigError(f"'coverage' lies in (0, 1], not {self.coverage}.")
        if not 0 <= self.continue_all_ratio <= 1:
            raise ConfigError(f"'continue_all_ratio' lies in [0, 1], not {self.continue_all_ratio}.")
        if self.decider_coefficient < 0:
            raise ConfigError(f"'decider_coefficient' must not be negative, not {self.decider_coefficient}.")
        for tag, weight in self.tag_weights.items():
            if not tag.isdecimal() or int(tag) >= TAGS or weight < 0:
                raise ConfigError(f"'tag_weights' maps tags 0 to {TAGS - 1} to weights >= 0, not {tag!r} to {weight}.")
        label_scheme(self.labels)
        weight_scheme(self.weights)


@dataclass(frozen=True)
class SystemSection:
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """"auto": bf16 mixed precision on GPUs, fp32 on CPU; master weights are always fp32."""
    activation_checkpointing: bool | None = None
    """Recompute blocks in backward; by default on GPUs alone."""
    compile: bool = False
    attention: str = "auto"
    threads: int | None = None
    """CPU threads of one process; torch's own choice by default."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"'threads' must be at least 1, not {self.threads}.")


@dataclass(frozen=True)
class ValidationSection:
    every: int = 100
    """Steps between validations; 0 validates at the end alone."""
    samples: int | None = None
    """At most so many held-out samples; all by default."""

    def __post_init__(self) -> None:
        if self.every < 0 or (self.samples is not None and self.samples < 1):
            raise ConfigError("'validation.every' is 0 or more steps, 'validation.samples' at least 1.")


@dataclass(frozen=True)
class CheckpointSection:
    every: int = 500
    """Steps between checkpoints; 0 writes one at the end alone."""
    keep: int = 2
    asynchronous: bool = True
    """Write in the background while training goes on."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ConfigError("'checkpoint.every' is 0 or more steps, 'checkpoint.keep' at least 1.")


@dataclass(frozen=True)
class LoggingSection:
    every: int = 10
    """Steps between two records; each record sums up the steps since the one before."""
    loggers: tuple[str, ...] | None = None
    """Beside the JSON lines that are always written; None: TensorBoard where it is installed."""
    project: str = "tah2"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"'logging.every' must be at least 1 step, not {self.every}.")
        check_loggers(self.loggers or ())


@dataclass(frozen=True)
class TrainConfig:
    """One run. `out` receives metrics, resumable checkpoints and, at the end, the Hugging Face folder `model`."""

    out: Path
    model: ModelSection
    budget: BudgetConfig
    loop: LoopConfig | None = None
    """None: the loop of the looped checkpoint that `model.path` names."""
    data: DataConfig | None = None
    procedural: ProceduralConfig | None = None
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    adapter: LoraConfig | None = None
    system: SystemSection = field(default_factory=SystemSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loop is not None:
            kind_of(self.loop)
        if (self.data is None) == (self.procedural is None):
            raise ConfigError("Give the training data as either 'data' (conversations) or 'procedural' (a task).")
        if self.model.shape is not None and self.adapter is not None:
            raise ConfigError("Adapters need pretrained weights: use 'model.path', not 'model.shape'.")
        if self.procedural is None and self.objective.tag_weights:
            raise ConfigError("'objective.tag_weights' needs data that tells kinds of tokens apart ('procedural').")
