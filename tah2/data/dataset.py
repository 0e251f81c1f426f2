"""From a `DataConfig` to something to train on: tokenised once and kept (map-style), or streamed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError, plain
from tah2.data.batches import Rank, Step, evaluation_batches, training_steps
from tah2.data.budget import DataSize
from tah2.data.config import BatchConfig, DataConfig, SourceConfig
from tah2.data.conversation import parse_row, row_id
from tah2.data.order import LoaderState, SampleOrder, held_out
from tah2.data.packing import PackedBatch
from tah2.data.report import BadRow, DataError, DataReport
from tah2.data.sources import RawRow, Source, open_source
from tah2.data.store import Sample, TokenStore, load_store, save_store
from tah2.data.template import Renderer

CACHE_FORMAT = 1
"""Part of every cache key: raise it when the same inputs would give other samples."""


@dataclass(frozen=True)
class DataSet:
    """Tokenised documents in memory: a training set in a fixed order, and a held-out validation set."""

    store: TokenStore
    train_groups: tuple[NDArray[np.int64], ...]
    """Indices into `store` of the training documents of each source."""
    validation: TokenStore
    report: DataReport
    seed: int = 0
    shares: tuple[float, ...] | None = None
    fingerprint: str = ""

    @property
    def size(self) -> DataSize:
        """Samples of one epoch and their mean length under the mixture."""
        order = SampleOrder(self.train_groups, self.shares, self.seed)
        means = [float(self.store.lengths[group].mean()) if len(group) else 0.0 for group in self.train_groups]
        tokens = sum(count * mean for count, mean in zip(order.counts, means, strict=True))
        return DataSize(tokens / max(1, order.epoch_size), order.epoch_size)

    def steps(self, config: BatchConfig, place: Rank | None = None, state: LoaderState | None = None) -> Iterator[Step]:
        """Endless optimizer steps of this rank, from `state` on."""
        order = SampleOrder(self.train_groups, self.shares, self.seed)
        return training_steps(self.store, order, config, place, state, self.fingerprint)

    def validation_batches(self, config: BatchConfig, place: Rank | None = None) -> tuple[PackedBatch, ...]:
        return evaluation_batches(self.validation, config.tokens_per_micro_batch, place)

    @staticmethod
    def of(
        store: TokenStore,
        *,
        report: DataReport | None = None,
        validation: TokenStore | None = None,
        validation_samples: int = 0,
        validation_fraction_cap: float = 0.1,
        seed: int = 0,
        shares: tuple[float, ...] | None = None,
        sources: int = 1,
        key: str = "",
    ) -> DataSet:
        """Split `store` into training and validation, unless a `validation` set is given."""
        taken = np.zeros(0, np.int64)
        if validation is None:
            taken = held_out(len(store), validation_samples, validation_fraction_cap, seed)
            validation = store.select(taken)
        report = report or DataReport()
        report.validation_samples = len(validation)
        free = np.setdiff1d(np.arange(len(store)), taken)
        groups = tuple(free[store.source[free] == index] for index in range(sources))
        identity = [key, seed, shares, len(store), len(taken)]
        return DataSet(store, groups, validation, report, seed, shares, _digest(json.dumps(identity))[:16])


class Reader:
    """Rows of opened sources -> samples; every row read ends in the report."""

    def __init__(self, config: DataConfig, renderer: Renderer) -> None:
        self.config = config
        self.renderer = renderer
        self.report = DataReport()
        for source in config.sources:
            self.report.of(source.label)

    def sample(self, source: SourceConfig, raw: RawRow) -> Sample | None:
        """The sample of one row, or None where the row is left out; the report says why."""
        counts = self.report.of(source.label)
        counts.read += 1
        try:
            row = raw.load()
            rendered = self.renderer.render(parse_row(row, source.columns), row_id(row, source.columns, raw.where))
        except BadRow as problem:
            if self.config.on_bad_rows == "fail":
                raise DataError(
                    f"{raw.where}: {problem}; correct the row, or set 'on_bad_rows' to 'skip'."
                ) from problem
            self.report.add_bad(source.label, raw.where, problem)
            return None
        sample = rendered.sample
        counts.rewritten_turns += rendered.rewritten_turns
        counts.trimmed_rows += rendered.trimmed
        counts.control_token_rows += rendered.has_control_tokens
        if len(sample) > self.config.max_tokens:
            counts.too_long += 1
            return None
        if not sample.supervised_tokens:
            counts.unsupervised += 1
            return None
        counts.kept += 1
        counts.tokens += len(sample)
        counts.supervised_tokens += sample.supervised_tokens
        return sample


def make_renderer(config: DataConfig, tokenizer: Any) -> Renderer:
    """The renderer that `config` asks for; refuses a chat template that cannot be used."""
    template = None
    if config.chat_template is not None:
        try:
            template = config.chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot read the chat template {config.chat_template}: {error.strerror}.") from None
    return Renderer(
        tokenizer, train_on=config.train_on, chat_template=template, template_arguments=config.template_arguments
    )


def load_data(config: DataConfig, tokenizer: Any) -> DataSet:
    """Read and tokenise everything once, or take it from the cache."""
    if config.streaming:
        raise ConfigError("'streaming' is set: open the data with tah2.data.streaming.stream_data.")
    renderer = make_renderer(config, tokenizer)
    sources = [open_source(source) for source in config.sources]
    key = cache_key(config, renderer, sources)
    path = None if config.cache_dir is None else config.cache_dir / f"tokens-{key[:32]}.npz"
    store, report = _cached(path) or _read_all(config, renderer, sources, path)
    own = load_validation(config, tokenizer)
    report.validation = None if own is None else own.report
    return DataSet.of(
        store,
        report=report,
        validation=None if own is None else own.store,
        validation_samples=config.validation_samples,
        validation_fraction_cap=config.validation_fraction_cap,
        seed=config.seed,
        shares=config.shares,
        sources=len(config.sources),
        key=key,
    )


def load_validation(config: DataConfig, tokenizer: Any) -> DataSet | None:
    """The validation set that has sources of its own, all of it in `store`."""
    if not config.validation_sources:
        return None
    own = replace(config, sources=config.validation_sources, validation_sources=(), validation_samples=0)
    return load_data(replace(own, streaming=False), tokenizer)


def cache_key(config: DataConfig, renderer: Renderer, sources: list[Source]) -> str:
    """A digest of everything that decides the tokenised samples: file contents, template, tokenizer, options."""
    options = [[plain(source.columns), source.limit] for source in config.sources]
    contents = [source.fingerprint() for source in sources]
    identity = [CACHE_FORMAT, renderer.fingerprint(), options, contents, config.max_tokens, config.on_bad_rows]
    return _digest(json.dumps(identity))


def _read_all(
    config: DataConfig, renderer: Renderer, sources: list[Source], path: Path | None
) -> tuple[TokenStore, DataReport]:
    reader = Reader(config, renderer)
    samples, origins = [], []
    for index, source in enumerate(sources):
        for raw in source.rows():
            sample = reader.sample(source.config, raw)
            if sample is not None:
                samples.append(sample)
                origins.append(index)
    refuse_empty(reader.report)
    store = TokenStore.of(samples, origins)
    if path is not None:
        save_store(store, path, json.dumps(reader.report.to_dict()))
        store, _ = load_store(path)
    return store, reader.report


def _cached(path: Path | None) -> tuple[TokenStore, DataReport] | None:
    if path is None or not path.exists():
        return None
    store, notes = load_store(path)
    return store, DataReport.from_dict(json.loads(notes))


def refuse_empty(report: DataReport) -> None:
    """Training on nothing is an error, not a run with zero loss."""
    if report.total.kept:
        return
    total = report.total
    if total.unsupervised and total.unsupervised == total.read - total.bad - total.too_long:
        raise DataError(
            "Not one token of the data has a loss: check 'train_on', and whether the chat template marks or renders "
            f"assistant turns. {report.describe()}"
        )
    raise DataError(f"No row of the data can be trained on. {report.describe()}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
