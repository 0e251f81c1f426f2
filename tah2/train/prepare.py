"""From a recipe to a model in fp32, to the data that it learns from, and to its start state."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, build, plain
from tah2.data.batches import Rank
from tah2.data.dataset import DataSet, load_data
from tah2.data.packing import PackedBatch
from tah2.data.procedural import ProceduralConfig, load_procedural
from tah2.data.streaming import StreamedData, stream_data
from tah2.model.checkpoint import kept_parts, looped_model
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tah2.model.loop import LoopedDecoder, Tokens
from tah2.model.source import Source, open_source
from tah2.model.start import fit_updater
from tah2.train.config import TrainConfig
from tah2.train.parallel import World

START_STEPS = 512
"""At most so many global batches are looked through for them."""
PATIENCE = timedelta(hours=12)
"""How long other ranks wait for rank 0 to tokenise the data: hours, where there are billions of tokens."""

Data = DataSet | StreamedData


@dataclass(frozen=True)
class Opened:
    """The model of a run, before training."""

    model: LoopedForCausalLM
    """fp32 master weights on the CPU, the only copy in memory"""
    export_dtype: torch.dtype
    has_reentry: bool
    """The checkpoint brought a trained reentry, so its start is not fitted again."""
    tokenizer: TemporaryDirectory[str] | None
    """The checkpoint's tokenizer files; the folder goes when this object does."""

    @property
    def tokenizer_folder(self) -> Path | None:
        return None if self.tokenizer is None else Path(self.tokenizer.name)

    def close(self) -> None:
        if self.tokenizer is not None:
            self.tokenizer.cleanup()


def open_model(config: TrainConfig) -> Opened:
    """The same on every rank."""
    torch.manual_seed(config.seed)
    if config.model.path is None:
        loop = _loop_of(config, None)
        model = LoopedForCausalLM(LoopedConfig(backbone=dict(config.model.shape or {}), loop=plain(loop)))
        model.model.reset()
        return Opened(model.float(), torch.float32, False, None)
    source = open_source(config.model.path)
    loop = _loop_of(config, source)
    model = looped_model(source, loop)
    dtype, has_reentry = model.dtype, "reentry" in kept_parts(model, source.weights)
    tokenizer = TemporaryDirectory(prefix="tah2-tokenizer-")
    source.save_tokenizer(Path(tokenizer.name))
    known = any(Path(tokenizer.name).iterdir())
    model = model.float()
    del source  # what was not taken over as it is must not stay in memory beside the fp32 weights
    gc.collect()
    return Opened(model, dtype, has_reentry, tokenizer if known else None)


def _loop_of(config: TrainConfig, source: Source | None) -> LoopConfig:
    if config.loop is not None:
        return config.loop
    if source is None or not source.is_looped:
        raise ConfigError("Say which loop to train ('loop.kind' and 'loop.max_depth'): the model has none of its own.")
    loop: dict[str, Any] = source.config["loop"]
    return build(LoopConfig, loop, "loop")


def open_data(config: TrainConfig, opened: Opened, world: World) -> Data:
    """Training and validation data; where tokenised data are cached, rank 0 makes the cache and the others read it."""
    if config.procedural is not None:
        return _fitting(load_procedural(config.procedural), opened.model)
    assert config.data is not None
    if opened.tokenizer_folder is None:
        raise ConfigError("Conversations need a tokenizer: train from a 'model.path' that has one.")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(opened.tokenizer_folder)
    if config.data.streaming:
        return stream_data(config.data, tokenizer)
    if config.data.cache_dir is None:
        return _fitting(load_data(config.data, tokenizer), opened.model)
    with main_first(world):
        return _fitting(load_data(config.data, tokenizer), opened.model)


def _fitting(data: DataSet, model: LoopedForCausalLM) -> DataSet:
    """Refuse ids that the model has no embedding for."""
    largest, vocabulary = int(data.store.ids.max()), model.model.backbone.vocab_size
    if largest >= vocabulary:
        raise ConfigError(
            f"The data hold token id {largest}, but the model's vocabulary ends at {vocabulary - 1}: "
            "train with the tokenizer that belongs to the model, or give 'model.shape' a larger 'vocab_size'."
        )
    return data


@contextmanager
def main_first(world: World, patience: timedelta = PATIENCE) -> Iterator[None]:
    """The body runs on rank 0, then on all others; every rank enters it."""
    with world.patient(patience) as barrier:
        if not world.is_main:
            barrier()
        yield
        if world.is_main:
            barrier()


def describe_data(config: TrainConfig, data: Data) -> str:
    """What there is to learn from, for people."""
    if config.procedural is None:
        return data.report.describe()
    return _described_task(config.procedural, data)


def _described_task(task: ProceduralConfig, data: Data) -> str:
    assert isinstance(data, DataSet)
    store, stage = data.store, " (its base)" if task.base else ""
    return (
        f"Task {task.task}{stage}: {len(store):,} samples ({len(store.ids):,} tokens, {int(store.mask.sum()):,} of "
        f"them with a loss), and {len(data.validation):,} more held out for validation."
    )


def start_reentry(config: TrainConfig, opened: Opened, data: Data, world: World) -> None:
    """Fit a learned updater's start on the run's first training tokens; rank 0 alone, whose weights all ranks get."""
    decoder = opened.model.model
    if config.model.start.updater == "random" or not decoder.reentry.fits_prediction or opened.has_reentry:
        return
    if world.is_main:
        decoder.to(world.device)
        fit_updater(decoder, start_tokens(config, decoder, data), config.model.start)


def start_tokens(config: TrainConfig, decoder: LoopedDecoder, data: Data) -> Tokens:
    """The first `model.start.tokens` training tokens, whole documents but for the last."""
    parts: list[Tensor] = []
    room = config.model.start.tokens
    for ids in _documents(config, data):
        parts.append(ids[:room].to(decoder.head_weight.device))
        room -= len(parts[-1])
        if room == 0:
            break
    return Tokens.pack(parts)


def _documents(config: TrainConfig, data: Data) -> Iterator[Tensor]:
    """Ids of training documents, one long tensor each, in training's order."""
    for step in islice(data.steps(config.batch, Rank()), START_STEPS):
        for batch in step.micro_batches:
            yield from split_documents(batch)


def split_documents(batch: PackedBatch) -> tuple[Tensor, ...]:
    return batch.ids.split(batch.document.bincount().tolist())
