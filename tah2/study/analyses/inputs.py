"""A checkpoint and the data to analyse it on, as users name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tah2.config.recipe import load_recipe
from tah2.config.strict import ConfigError, build, read_mapping
from tah2.data.batches import evaluation_batches
from tah2.data.config import DataConfig, SourceConfig
from tah2.data.dataset import load_data
from tah2.data.packing import PackedBatch
from tah2.data.procedural import TASKS, ProceduralConfig
from tah2.data.store import TokenStore, load_store
from tah2.data.tags import tag_name
from tah2.model.hf import LoopedForCausalLM
from tah2.model.loop import LoopedDecoder

RECIPES = (".yaml", ".yml")
ROWS = 1000
"""Conversations that are looked through for ones that fit, at least"""
CONVERSATIONS = (".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True)
class DataChoice:
    """Which documents to analyse."""

    data: str
    """A procedural task, a token store (.npz), a training recipe (.yaml: its validation set), or conversations: a JSONL
    or Parquet file, a folder or a hub id"""
    samples: int = 200
    """At most so many documents"""
    max_tokens: int = 4096
    """Longer documents are left out"""
    tokens_per_batch: int = 8192
    seed: int = 0
    """Of procedural tasks"""
    recipe: Mapping[str, Any] | None = None
    """A training recipe, read; its validation set is then the data"""

    def __post_init__(self) -> None:
        if min(self.samples, self.max_tokens, self.tokens_per_batch) < 1:
            raise ConfigError("'samples', 'max_tokens' and 'tokens_per_batch' must be at least 1.")


@dataclass(frozen=True)
class Subject:
    """What an analysis looks at."""

    model: str
    """As the user named it"""
    data: str
    decoder: LoopedDecoder
    store: TokenStore
    tag_names: dict[int, str]
    """Names of the tags that occur; empty where the data tells no kinds apart"""
    tokenizer: Any = None
    """None where the checkpoint has none"""

    def batches(self, tokens: int) -> Sequence[PackedBatch]:
        return evaluation_batches(self.store, tokens)

    def words(self, ids: Sequence[int]) -> list[str]:
        """One printable string per token."""
        if self.tokenizer is None:
            return [f"{token} " for token in ids]
        return spoken(self.tokenizer, ids)


def spoken(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds behind the one before it, spaces included."""
    words = []
    for before, token in zip((None, *ids), ids, strict=False):
        context = [] if before is None else [before]
        words.append(tokenizer.decode([*context, token])[len(tokenizer.decode(context)) :])
    return words


def open_subject(model: str | Path, choice: DataChoice, device: str = "cpu") -> Subject:
    """Load a looped checkpoint and the documents to run it over."""
    loaded = open_checkpoint(model, device)
    tokenizer = open_tokenizer(model)
    store = open_documents(choice, tokenizer)
    if not len(store):
        raise ConfigError(f"{choice.data} holds no document of at most {choice.max_tokens} tokens with a loss.")
    largest, vocabulary = int(store.ids.max()), loaded.model.backbone.vocab_size
    if largest >= vocabulary:
        raise ConfigError(
            f"{choice.data} holds token id {largest}, but the vocabulary of {model} ends at {vocabulary - 1}: "
            "give data that were made for this model."
        )
    return Subject(str(model), choice.data, loaded.model, store, tag_names(store), tokenizer)


def open_checkpoint(model: str | Path, device: str = "cpu") -> LoopedForCausalLM:
    """In fp32 whatever it was saved in: a change of 0.001 nats is below what bf16 can tell."""
    from tah2.model.checkpoint import load
    from tah2.model.folder import MARKER

    config = Path(model) / MARKER
    looks_local = Path(model).is_absolute() or str(model).startswith(".") or str(model).count("/") > 1
    if looks_local and not Path(model).exists():
        raise ConfigError(f"There is no checkpoint at {model}.")
    is_plain = config.is_file() and read_mapping(config).get("model_type") != "looped"
    if is_plain or Path(model).suffix == ".gguf":
        raise ConfigError(f"{model} is no looped checkpoint; make one with 'tah2 convert {model} OUT'.")
    with _quiet():
        return load(model, dtype=torch.float32, device=device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bar that transformers draws while it reads weights."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def open_tokenizer(model: str | Path) -> Any:
    """The checkpoint's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(model)


def open_documents(choice: DataChoice, tokenizer: Any) -> TokenStore:
    """At most `choice.samples` documents; where the data says which are held out, those."""
    path = Path(choice.data)
    if choice.recipe is not None or path.suffix in RECIPES:
        recipe = load_recipe(path) if choice.recipe is None else choice.recipe
        return _some(_validation_of(recipe, choice, tokenizer), choice)
    if choice.data in procedural_tasks():
        return _held_out({"task": choice.data, "seed": choice.seed}, choice.samples)
    if path.suffix == ".npz":
        return _some(load_store(path)[0], choice)
    if tokenizer is None:
        raise ConfigError(
            f"{choice.data} names conversations, and the checkpoint has no tokenizer to read them with; "
            f"its data may be a token store (.npz) or a task: {', '.join(procedural_tasks())}."
        )
    return _some(load_data(_conversations(choice), tokenizer).store, choice)


def _conversations(choice: DataChoice) -> DataConfig:
    path = Path(choice.data)
    local = path.exists() or path.suffix in CONVERSATIONS or any(sign in choice.data for sign in "*?[")
    limit = max(ROWS, 4 * choice.samples)  # rows that do not fit are left out
    source = SourceConfig(path=choice.data, limit=limit) if local else SourceConfig(id=choice.data, limit=limit)
    return DataConfig((source,), max_tokens=max(2, choice.max_tokens), validation_samples=0)


def _validation_of(recipe: Mapping[str, Any], choice: DataChoice, tokenizer: Any) -> TokenStore:
    """The validation set of a training recipe; of a procedural task no more than is asked for."""
    name = choice.data
    if recipe.get("procedural"):
        return _held_out(recipe["procedural"], choice.samples)
    if recipe.get("data"):
        if tokenizer is None:
            raise ConfigError(f"{name} trains on conversations, and the checkpoint has no tokenizer to read them with.")
        return load_data(build(DataConfig, recipe["data"], "data"), tokenizer).validation
    raise ConfigError(f"{name} has neither a 'procedural' nor a 'data' section.")


def _held_out(task: Mapping[str, Any], samples: int) -> TokenStore:
    """So many validation samples of a procedural task; no training data are made."""
    config = build(ProceduralConfig, task, "procedural")
    return config.build_task().generate(samples, config.seed, "validation")


def _some(store: TokenStore, choice: DataChoice) -> TokenStore:
    fitting = [i for i in range(len(store)) if store.lengths[i] <= choice.max_tokens and store.supervised[i]]
    return store.select(fitting[: choice.samples])


def procedural_tasks() -> tuple[str, ...]:
    return tuple(TASKS)


def tag_names(store: TokenStore) -> dict[int, str]:
    if store.tags is None:
        return {}
    return {tag: tag_name(tag) for tag in sorted({int(tag) for tag in store.tags[store.mask]})}
