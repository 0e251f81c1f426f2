"""From a recipe to a model in fp32 with its start state, and to the data it learns from."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, build, plain
from tah2.data.batches import Rank
from tah2.data.dataset import DataSet, load_data
from tah2.data.procedural import load_procedural
from tah2.data.streaming import StreamedData, stream_data
from tah2.model.checkpoint import looped_model
from tah2.model.folder import PREFIX
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tah2.model.kinds import kind_of
from tah2.model.loop import Tokens
from tah2.model.source import Source, open_source
from tah2.model.start import fit_updater
from tah2.train.config import TrainConfig
from tah2.train.lora import add_adapters

START_TOKENS = 4096
"""Training tokens on which an updater's start is fitted."""


@dataclass(frozen=True)
class Prepared:
    model: LoopedForCausalLM
    data: DataSet | StreamedData
    tokenizer_folder: Path | None
    """Tokenizer files to keep with the exported model."""
    export_dtype: torch.dtype


def prepare(config: TrainConfig) -> Prepared:
    """Model (fp32 master weights, CPU), data and tokenizer of a run; the same on every rank."""
    torch.manual_seed(config.seed)
    source = None if config.model.path is None else open_source(config.model.path)
    loop = _loop_of(config, source)
    kind_of(loop)
    tokenizer_folder = None
    if source is not None:
        tokenizer_folder = Path(tempfile.mkdtemp(prefix="tah2-tokenizer-"))
        source.save_tokenizer(tokenizer_folder)
        tokenizer_folder = tokenizer_folder if any(tokenizer_folder.iterdir()) else None
        model = looped_model(source, loop)
    else:
        shape = dict(config.model.shape or {})
        model = LoopedForCausalLM(LoopedConfig(backbone=shape, loop=plain(loop)))
        model.model.reset()
    dtype = model.dtype
    model = model.float()
    data = _load_data(config, tokenizer_folder)
    if not _has_reentry(source):
        _start(config, model, data)
    if config.adapter is not None:
        add_adapters(model.model, config.adapter)
    return Prepared(model, data, tokenizer_folder, dtype)


def _loop_of(config: TrainConfig, source: Source | None) -> LoopConfig:
    if config.loop is not None:
        return config.loop
    if source is None or source.config.get("model_type") != "looped":
        raise ConfigError("Say which loop to train ('loop.kind' and 'loop.max_depth'): the model has none of its own.")
    loop: dict[str, Any] = source.config["loop"]
    return build(LoopConfig, loop, "loop")


def _load_data(config: TrainConfig, tokenizer_folder: Path | None) -> DataSet | StreamedData:
    if config.procedural is not None:
        return load_procedural(config.procedural)
    assert config.data is not None
    if tokenizer_folder is None:
        raise ConfigError("Conversations need a tokenizer: train from a 'model.path' that has one.")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return (stream_data if config.data.streaming else load_data)(config.data, tokenizer)


def _has_reentry(source: Source | None) -> bool:
    return source is not None and any(name.startswith(f"{PREFIX}reentry.") for name in source.weights)


def _start(config: TrainConfig, model: LoopedForCausalLM, data: DataSet | StreamedData) -> None:
    """Fit a learned updater's start on the run's first training tokens."""
    if config.model.start.updater == "random" or not model.model.reentry.fits_prediction:
        return
    if config.model.start.text is not None:
        raise ConfigError("'model.start.text' is for `tah2 convert`; training fits the start on its own data.")
    step = next(iter(data.steps(config.batch, Rank())))
    parts: list[Tensor] = []
    room = START_TOKENS
    for batch in step.micro_batches:
        for document in range(batch.documents):
            ids = batch.ids[batch.document == document][:room]
            parts.append(ids)
            room -= len(ids)
            if room <= 0:
                break
        if room <= 0:
            break
    fit_updater(model.model, Tokens.pack(parts), config.model.start)
