"""What to train on, as frozen configurations.

The mixture of the paper, by id (math, code and QA prompts of AM-Qwen3-Distilled, tool use of Nemotron-Agentic):

    sources:
      - id: a-m-team/AM-Qwen3-Distilled
        files: [math.jsonl, code.jsonl, science.jsonl, other.jsonl]
        columns: {system: ""}        # its system prompts ask for <think>/<answer> tags; they are not trained on
        weight: 0.8
      - id: nvidia/Nemotron-Agentic-v1
        files: [data/tool_calling.jsonl, data/interactive_agent.jsonl]
        weight: 0.2

Both are sets of JSON lines whose rows differ in shape (tool schemas above all), which Arrow cannot hold in one
table; naming their `files` reads the lines themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tah2.config.strict import ConfigError, suggestion

COLUMNS = ("messages", "prompt", "completion", "text", "tools", "system", "id")
"""The columns that a row may have; `SourceConfig.columns` maps these names to the names that a data set uses."""

TrainOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True)
class SourceConfig:
    """One data set: local files (`path`) or a Hugging Face data set (`id`)."""

    path: str = ""
    """A JSONL or Parquet file, a folder of them, or a pattern such as `data/*.jsonl`."""
    id: str = ""
    """A Hugging Face data set, `owner/name`."""
    files: tuple[str, ...] = ()
    """Files (or patterns) of the data set `id`, read directly; without them the `datasets` library reads it."""
    name: str | None = None
    """The configuration of the data set `id`, where it has several."""
    split: str = "train"
    revision: str | None = None
    weight: float | None = None
    """Share of the mixture. Give it for every source or for none: without weights each row comes once an epoch."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our column name -> the row's; an empty name ignores that column."""
    limit: int | None = None
    """Read only the first so many rows."""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.id):
            raise ConfigError("Give a data source either a 'path' (local files) or an 'id' (Hugging Face data set).")
        if self.path and (self.files or self.name or self.revision):
            raise ConfigError(f"Source {self.path!r} is local: 'files', 'name' and 'revision' belong to an 'id'.")
        for column in self.columns:
            if column not in COLUMNS:
                raise ConfigError(f"Unknown column {column!r} in 'columns'{suggestion(column, COLUMNS)}.")
        if self.weight is not None and not self.weight > 0:
            raise ConfigError(f"The weight of a source must be positive, not {self.weight}.")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"The limit of a source must be at least 1, not {self.limit}.")

    @property
    def label(self) -> str:
        """The name of the source in reports."""
        if self.path:
            return self.path
        return ":".join([self.id, *([self.name] if self.name else []), *([] if self.files else [self.split])])


@dataclass(frozen=True)
class DataConfig:
    """Sources and how rows become samples."""

    sources: tuple[SourceConfig, ...]
    train_on: TrainOn = "assistant"
    """Tokens with a loss: all assistant turns, the last assistant message alone, or everything."""
    max_tokens: int = 16384
    """Samples whose prompt and response together exceed this are left out and counted."""
    validation_sources: tuple[SourceConfig, ...] = ()
    """Validation samples in files of their own, read whole; then none are held out of `sources`."""
    validation_samples: int = 1000
    """Held out of `sources` at random."""
    validation_fraction_cap: float = 0.1
    """The held-out set takes at most this fraction of a small data set."""
    seed: int = 0
    on_bad_rows: Literal["skip", "fail"] = "skip"
    streaming: bool = False
    """Read rows as training goes instead of tokenising everything first."""
    shuffle_buffer: int = 10000
    """Rows held for shuffling when streaming."""
    chat_template: Path | None = None
    """A Jinja file to use instead of the tokenizer's own chat template."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""
    cache_dir: Path | None = None
    """Keep tokenised data sets here, keyed by the content of all inputs."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("Name at least one data source in 'sources'.")
        weighted = sum(source.weight is not None for source in self.sources)
        if weighted not in (0, len(self.sources)):
            raise ConfigError(
                "Give every data source a 'weight' or none: without weights each row comes once an epoch."
            )
        if any(source.weight is not None for source in self.validation_sources):
            raise ConfigError("'validation_sources' are read whole: give them a 'limit' instead of a 'weight'.")
        if self.streaming and len(self.sources) > 1 and not weighted:
            raise ConfigError("A streamed mixture needs a 'weight' for every source, as its sizes are not known.")
        if self.max_tokens < 2:
            raise ConfigError(f"'max_tokens' must be at least 2, not {self.max_tokens}.")
        if self.validation_samples < 0 or not 0 <= self.validation_fraction_cap < 1:
            raise ConfigError("'validation_samples' must be at least 0 and 'validation_fraction_cap' in [0, 1).")
        if self.shuffle_buffer < 1:
            raise ConfigError(f"'shuffle_buffer' must be at least 1, not {self.shuffle_buffer}.")

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Share of each source in the mixture, or None when each row comes once an epoch."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return tuple(weight / sum(weights) for weight in weights) if weights else None


@dataclass(frozen=True)
class BatchConfig:
    """An optimizer step is counted in samples; a micro-batch in tokens."""

    samples: int = 128
    """Samples of one optimizer step over all ranks."""
    tokens_per_micro_batch: int = 16384
    """At most so many tokens in one pass of one rank; a longer single sample makes its own micro-batch."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.tokens_per_micro_batch < 1:
            raise ConfigError("'samples' and 'tokens_per_micro_batch' must be at least 1.")
