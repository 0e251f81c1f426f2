"""The order of samples: a function of (seed, epoch), never of the number of ranks.

Samples form one endless sequence, epoch after epoch; optimizer step s takes samples [s B, (s + 1) B) of it, so no
sample is dropped at the end of an epoch. The place in the sequence is the whole state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError

SHUFFLE, VALIDATION, SOURCE, MIXTURE, BUFFER = range(5)
"""Independent random streams of one seed."""


@dataclass(frozen=True)
class LoaderState:
    """Where training stands in its data: `sample` samples of epoch `epoch` are used (streamed: rows drawn in all)."""

    epoch: int = 0
    sample: int = 0
    step: int = 0
    fingerprint: str = ""
    """Names the data and the order; a state is refused where they differ."""

    def require(self, fingerprint: str) -> None:
        if self.fingerprint and self.fingerprint != fingerprint:
            raise ConfigError(
                "The checkpoint was trained on other data or another data seed: "
                "restore the data settings, or start without the data state of the checkpoint."
            )


def mixed_hash(*keys: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit hash of counters (splitmix64 steps): the same on every machine and library version."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = state ^ (np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def shuffled(count: int, *keys: int) -> NDArray[np.int64]:
    """A permutation of 0 .. count-1 that depends on `keys` alone."""
    return np.argsort(mixed_hash(*keys, np.arange(count, dtype=np.uint64)), kind="stable").astype(np.int64)


class SampleOrder:
    """Every epoch's samples, drawn from `groups` (one array of sample indices per source).

    Without `shares` an epoch holds each sample once. With them it is as long, but source i fills its share: its
    samples come round and round, reshuffled each time, so that over epochs all are used equally often.
    """

    def __init__(
        self, groups: Sequence[NDArray[np.int64]], shares: Sequence[float] | None = None, seed: int = 0
    ) -> None:
        self.groups = list(groups)
        self.seed = seed
        self.epoch_size = sum(len(group) for group in groups)
        self.counts = [len(group) for group in groups] if shares is None else split_by_share(self.epoch_size, shares)
        for index, (group, count) in enumerate(zip(self.groups, self.counts, strict=True)):
            if count and not len(group):
                raise ConfigError(f"Data source {index} has no sample left, but a weight in the mixture: remove it.")
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Sample indices of one epoch in order, int64 `[epoch_size]`."""
        if self._cached is None or self._cached[0] != epoch:
            parts = [self._drawn(i, epoch * count, count) for i, count in enumerate(self.counts)]
            joined = np.concatenate(parts)
            self._cached = (epoch, joined[shuffled(len(joined), self.seed, SHUFFLE, epoch)])
        return self._cached[1]

    def take(self, epoch: int, sample: int, count: int) -> tuple[NDArray[np.int64], int, int]:
        """The next `count` sample indices from a place, and the place after them."""
        taken: list[NDArray[np.int64]] = []
        while count:
            part = self.epoch(epoch)[sample : sample + count]
            taken.append(part)
            count -= len(part)
            sample += len(part)
            if sample == self.epoch_size:
                epoch, sample = epoch + 1, 0
        return np.concatenate(taken), epoch, sample

    def _drawn(self, source: int, start: int, count: int) -> NDArray[np.int64]:
        """Draws [start, start + count) of one source's endless sequence of rounds."""
        group = self.groups[source]
        if not count:
            return group[:0]
        first, last = start // len(group), (start + count - 1) // len(group)
        rounds = [group[shuffled(len(group), self.seed, SOURCE, source, number)] for number in range(first, last + 1)]
        offset = start - first * len(group)
        return np.concatenate(rounds)[offset : offset + count]


def split_by_share(total: int, shares: Sequence[float]) -> list[int]:
    """`total` as whole numbers in the ratio of `shares` (largest remainders)."""
    exact = np.asarray(shares, float) / sum(shares) * total
    counts = np.floor(exact).astype(int)
    for index in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    return [int(count) for count in counts]


def held_out(count: int, wanted: int, fraction_cap: float, seed: int) -> NDArray[np.int64]:
    """A random validation set: at most `wanted` of `count` samples, and at most that fraction of them; sorted."""
    size = min(wanted, int(count * fraction_cap))
    return np.sort(shuffled(count, seed, VALIDATION)[:size])
