"""Optimizer steps: the samples of this rank, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tah2.config.strict import ConfigError
from tah2.data.balance import plan_micro_batches
from tah2.data.config import BatchConfig
from tah2.data.order import LoaderState, SampleOrder
from tah2.data.packing import PackedBatch, pack
from tah2.data.store import Sample, TokenStore


@dataclass(frozen=True)
class Step:
    """What one rank runs for one optimizer step. Counts are of the whole global batch, equal on every rank."""

    micro_batches: tuple[PackedBatch, ...]
    """As many on every rank; placeholders where a rank has less to do."""
    samples: int
    tokens: int
    supervised_tokens: int
    state: LoaderState
    """The place after this step: save it with the checkpoint."""


@dataclass(frozen=True)
class Rank:
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"Rank {self.rank} is not among {self.world_size} ranks.")


def micro_batches(samples: Sequence[Sample], budget: int, place: Rank) -> tuple[PackedBatch, ...]:
    """This rank's micro-batches of the global batch `samples`."""
    plan = plan_micro_batches([len(sample) for sample in samples], place.world_size, budget)[place.rank]
    tagged = all(sample.tags is not None for sample in samples)
    return tuple(pack([samples[i] for i in part]) if part else PackedBatch.placeholder(tagged) for part in plan)


def step_of(samples: Sequence[Sample], config: BatchConfig, place: Rank, state: LoaderState) -> Step:
    """One step from the samples of a whole global batch; `state` is the place after it."""
    return Step(
        micro_batches=micro_batches(samples, config.tokens_per_micro_batch, place),
        samples=len(samples),
        tokens=sum(len(sample) for sample in samples),
        supervised_tokens=sum(sample.supervised_tokens for sample in samples),
        state=state,
    )


def training_steps(
    store: TokenStore,
    order: SampleOrder,
    config: BatchConfig,
    place: Rank | None = None,
    state: LoaderState | None = None,
    fingerprint: str = "",
) -> Iterator[Step]:
    """Endless optimizer steps from `state` on; the caller stops when its budget is spent."""
    place = place or Rank()
    state = state or LoaderState()
    state.require(fingerprint)
    if not order.epoch_size:
        raise ConfigError("There is no sample to train on.")
    while True:
        chosen, epoch, sample = order.take(state.epoch, state.sample, config.samples)
        state = LoaderState(epoch, sample, state.step + 1, fingerprint)
        yield step_of([store.sample(int(i)) for i in chosen], config, place, state)


def evaluation_batches(
    store: TokenStore, tokens_per_micro_batch: int, place: Rank | None = None
) -> tuple[PackedBatch, ...]:
    """All documents of `store` once over the ranks, in as many micro-batches on every rank."""
    samples = [store.sample(i) for i in range(len(store))]
    return micro_batches(samples, tokens_per_micro_batch, place or Rank()) if samples else ()
