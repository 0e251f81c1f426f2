"""Training on rows as they are read: a shuffle buffer per source, a weighted mixture, exact resumption.

The stream is one endless sequence of *undecoded* rows whose order depends on the seed and the sources alone. Its
place is the number of rows drawn, so resuming draws and discards that many rows without tokenising them, and then
goes on with the very next one. Every rank reads the whole stream and packs its own share of each global batch: that
costs each rank the tokenisation of all, and needs no communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError
from tah2.data.batches import Rank, Step, evaluation_batches, step_of
from tah2.data.budget import DataSize
from tah2.data.config import BatchConfig, DataConfig
from tah2.data.dataset import DataSet, Reader, load_validation, make_renderer, refuse_empty
from tah2.data.order import BUFFER, MIXTURE, LoaderState, mixed_hash
from tah2.data.packing import PackedBatch
from tah2.data.report import DataError, DataReport
from tah2.data.sources import RawRow, Source, open_source
from tah2.data.store import Sample, TokenStore
from tah2.data.template import Renderer

TRAINING_STREAM, VALIDATION_STREAM = 0, 1
PATIENCE = 1000
"""Rows after which a stream that gave no sample at all is given up."""


@dataclass(frozen=True)
class Drawn:
    """A row of the mixture: its source, and how often that source has begun anew."""

    source: int
    rounds: int
    row: RawRow


def mixed_rows(
    sources: Sequence[Source], shares: Sequence[float], seed: int, buffer: int, kind: int
) -> Iterator[Drawn]:
    """The endless mixture: draw n comes from source i with probability `shares[i]`."""
    streams = [_shuffled(source, index, seed, buffer, kind) for index, source in enumerate(sources)]
    bounds = [sum(shares[: i + 1]) for i in range(len(shares))]
    number = 0
    while True:
        point = int(mixed_hash(seed, MIXTURE, kind, number)[0]) / 2**64 * bounds[-1]
        chosen = next((i for i, bound in enumerate(bounds) if point < bound), len(bounds) - 1)
        yield next(streams[chosen])
        number += 1


def _shuffled(source: Source, index: int, seed: int, buffer: int, kind: int) -> Iterator[Drawn]:
    """Rows of one source round and round: each draw takes a random row of the buffer, each round is used up first."""
    rounds, number = 0, 0
    while True:
        held: list[Drawn] = []
        for row in source.rows():
            held.append(Drawn(index, rounds, row))
            if len(held) > buffer:
                yield _take(held, mixed_hash(seed, BUFFER, kind, index, number))
                number += 1
        if not held:
            raise DataError(f"The data source {source.config.label!r} has no rows.")
        while held:
            yield _take(held, mixed_hash(seed, BUFFER, kind, index, number))
            number += 1
        rounds += 1


def _take(held: list[Drawn], noise: NDArray[np.uint64]) -> Drawn:
    """Remove one row of `held`: the last one fills its place."""
    place = int(noise[0]) % len(held)
    held[place], held[-1] = held[-1], held[place]
    return held.pop()


class StreamedData:
    """The streamed twin of `DataSet`: `steps`, `validation_batches`, `size` and a report that grows."""

    def __init__(
        self, config: DataConfig, renderer: Renderer, sources: Sequence[Source], validation: DataSet | None = None
    ) -> None:
        self.config = config
        self.sources = list(sources)
        self.reader = Reader(config, renderer)
        self.held_out: set[tuple[int, int]] = set()
        self.validation = self._draw_validation() if validation is None else validation.store
        if validation is not None:
            self.report.validation, self.report.validation_samples = validation.report, len(validation.store)
        key = [renderer.fingerprint(), repr(config.sources), config.seed, config.max_tokens, config.shuffle_buffer]
        self.fingerprint = hashlib.sha256(repr([*key, len(self.validation)]).encode()).hexdigest()[:16]

    @property
    def report(self) -> DataReport:
        """Rows that this process has read so far, rows of a later round again."""
        return self.reader.report

    @property
    def size(self) -> DataSize:
        """The mean length of all samples seen so far; the number of samples is not known."""
        total = self.report.total
        return DataSize(total.tokens / max(1, total.kept))

    def validation_batches(self, config: BatchConfig, place: Rank | None = None) -> tuple[PackedBatch, ...]:
        return evaluation_batches(self.validation, config.tokens_per_micro_batch, place)

    def steps(self, config: BatchConfig, place: Rank | None = None, state: LoaderState | None = None) -> Iterator[Step]:
        """Endless optimizer steps of this rank, from `state` on."""
        state = state or LoaderState()
        state.require(self.fingerprint)
        rows = self._rows(TRAINING_STREAM)
        for _ in range(state.sample):
            next(rows)
        drawn, step = state.sample, state.step
        fruitful: dict[int, int] = {}
        while True:
            samples: list[Sample] = []
            while len(samples) < config.samples:
                row = next(rows)
                drawn += 1
                if row.rounds > fruitful.setdefault(row.source, row.rounds) + 1:
                    raise DataError(
                        f"The data source {self.config.sources[row.source].label!r} has no row left to train on. "
                        f"{self.report.describe()}"
                    )
                sample = None if (row.source, row.row.number) in self.held_out else self._read(row)
                if sample is not None:
                    fruitful[row.source] = row.rounds
                    samples.append(sample)
            step += 1
            yield step_of(samples, config, place or Rank(), LoaderState(row.rounds, drawn, step, self.fingerprint))

    def _rows(self, kind: int) -> Iterator[Drawn]:
        shares = self.config.shares or (1.0,)
        return mixed_rows(self.sources, shares, self.config.seed, self.config.shuffle_buffer, kind)

    def _read(self, drawn: Drawn) -> Sample | None:
        sample = self.reader.sample(self.config.sources[drawn.source], drawn.row)
        if self.report.total.read == PATIENCE:
            refuse_empty(self.report)
        return sample

    def _draw_validation(self) -> TokenStore:
        """The first usable rows of a stream of its own; they never come up in training."""
        samples: list[Sample] = []
        for drawn in self._rows(VALIDATION_STREAM) if self.config.validation_samples else ():
            if drawn.rounds:
                raise ConfigError(
                    f"The streamed data end before {self.config.validation_samples} validation samples are found: "
                    "lower 'validation_samples', or do not stream."
                )
            sample = self._read(drawn)
            self.held_out.add((drawn.source, drawn.row.number))
            if sample is not None:
                samples.append(sample)
            if len(samples) == self.config.validation_samples:
                break
        self.report.validation_samples = len(samples)
        return TokenStore.of(samples)


def stream_data(config: DataConfig, tokenizer: Any) -> StreamedData:
    """Open the sources of `config` for streaming and draw the validation set."""
    renderer = make_renderer(config, tokenizer)
    sources = [open_source(source, streaming=True) for source in config.sources]
    return StreamedData(config, renderer, sources, load_validation(config, tokenizer))
