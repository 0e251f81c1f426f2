"""What to ask, whom, how, and which answers become training data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tah2.config.strict import ConfigError
from tah2.data.config import SourceConfig
from tah2.evals.endpoint import EndpointConfig

Results = Literal["replay", "keep", "drop"]
Choose = Literal["first", "shortest", "all"]

RECORDED = "recorded"
"""Stands for the teacher of answers that the data hold already."""


@dataclass(frozen=True)
class EngineTeacher:
    """A looped checkpoint of ours, run by the engine in this process."""

    model: str
    """A folder or hub id, as for `LLM`."""
    in_flight: int = 32
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`."""

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise ConfigError(f"'teacher.engine.in_flight' must be at least 1, not {self.in_flight}.")


@dataclass(frozen=True)
class TeacherConfig:
    """Exactly one of a server, the local engine, and the responses that the data hold already."""

    endpoint: EndpointConfig | None = None
    engine: EngineTeacher | None = None
    recorded: bool = False
    """Ask nobody: filter, deduplicate and decontaminate the responses of the data set itself."""
    name: str = ""
    """Written into every row; empty: the name of the model that is asked."""

    def __post_init__(self) -> None:
        if (self.endpoint is not None) + (self.engine is not None) + self.recorded != 1:
            raise ConfigError(
                "Name one teacher: 'teacher.endpoint' (a server), 'teacher.engine' (a local model) or "
                "'teacher.recorded: true' (the responses of the data)."
            )

    @property
    def asked(self) -> str:
        """The model that decides what is answered; part of a run's identity."""
        if self.endpoint is not None:
            return self.endpoint.model
        return RECORDED if self.engine is None else self.engine.model


@dataclass(frozen=True)
class SamplingConfig:
    """How the teacher draws its responses; the paper's settings."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    min_p: float = 0.0
    max_tokens: int = 16384
    """Of one response; a longer one is cut off there, and then filtered as truncated."""
    seed: int = 0
    samples: int = 1
    """Responses to each prompt, of which `filter.choose` keeps one or all."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Further variables of the teacher's chat template, such as `enable_thinking`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request; null takes a field away."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.max_tokens < 1:
            raise ConfigError("'sampling.samples' and 'sampling.max_tokens' must be at least 1.")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError("At temperature 0 all samples are the same: set 'sampling.samples' to 1.")


@dataclass(frozen=True)
class GradeConfig:
    """Keep only right responses, as the grader of a benchmark judges them."""

    task: str
    """The benchmark whose grader judges: gsm8k, math500, mbpp, gpqa, ..."""
    columns: dict[str, str] = field(default_factory=lambda: {"answer": "answer"})
    """What the grader reads -> the prompt row's column that holds it."""
    ungraded: Literal["keep", "drop"] = "drop"
    """What becomes of prompts whose row lacks one of these columns."""


@dataclass(frozen=True)
class FilterConfig:
    """Which responses become rows. Filters may change between runs: nobody is asked again."""

    max_tokens: int = 16384
    """Prompt and response together, as the student's chat template writes them."""
    tokenizer: str = ""
    """The student's tokenizer, which counts tokens; empty: the teacher's own counts are taken."""
    min_characters: int = 1
    """Responses with less text than this, thinking aside, count as empty."""
    grade: GradeConfig | None = None
    choose: Choose = "first"
    """Of several responses that pass: the first, the shortest (in tokens), or all of them as rows of their own."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2 or self.min_characters < 0:
            raise ConfigError("'filter.max_tokens' must be at least 2 and 'filter.min_characters' at least 0.")


@dataclass(frozen=True)
class DecontaminateConfig:
    """Prompts that share a problem with a benchmark are not asked."""

    benchmarks: tuple[str, ...] = ("all",)
    data_dir: Path | None = None
    """A folder of local copies; without it TAH2_BENCHMARKS and then the Hugging Face hub are asked."""
    words: int = 13
    """The length of a shared run of words that counts as an overlap."""

    def __post_init__(self) -> None:
        if self.words < 2:
            raise ConfigError(f"'decontaminate.words' must be at least 2, not {self.words}.")


@dataclass(frozen=True)
class DistillConfig:
    sources: tuple[SourceConfig, ...]
    teacher: TeacherConfig
    out: Path
    sampling: SamplingConfig = SamplingConfig()
    filter: FilterConfig = FilterConfig()
    decontaminate: DecontaminateConfig | None = None
    tool_results: Results = "replay"
    """Prompts whose recorded answer calls tools: replay the recorded results while the teacher makes the same calls,
    keep the recorded answer, or drop the prompt."""
    held_out: int = 0
    """Rows that go to validation.jsonl instead of train.jsonl; which ones depends on seed and prompts alone."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("Name at least one source of prompts in 'sources'.")
        if self.held_out < 0:
            raise ConfigError(f"'held_out' must be at least 0, not {self.held_out}.")
        if any(source.weight is not None for source in self.sources):
            raise ConfigError("Prompts are asked once each: give sources a 'limit' instead of a 'weight'.")
        if self.teacher.recorded and self.sampling.samples > 1:
            raise ConfigError("The data hold one response each: 'sampling.samples' must be 1 for recorded ones.")
