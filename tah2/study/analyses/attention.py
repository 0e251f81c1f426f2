"""Which iterations do attention heads read? Mass by the depth of keys, for queries at the last iteration.

    mass(l, h, j) = sum of the weights that head h of layer l gives to keys of depth j

averaged over the response queries of a sequence first, then over sequences. Maps show the same weights over the first
positions of the response, position by position; prompt keys are left out of maps and nothing is renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tah2.config.strict import ConfigError
from tah2.data.packing import IGNORE, PackedBatch
from tah2.model.attention.observe import observing
from tah2.model.loop import LoopedDecoder, LoopSettings
from tah2.study.analyses.measure import Progress
from tah2.train.readers import TargetReader
from tah2.train.schemes import tokens_of
from tah2.visibility import Entries

Floats = NDArray[np.float64]
REACHED = 0.25
"""Share of the sequences in which an iteration has to occur, so that its attention is not that of a few"""
ROLES = ("first", "later", "both")
"""Representative heads: most mass on the first iteration, most on later ones, and most evenly on all."""


@dataclass(frozen=True)
class Head:
    role: str
    layer: int
    head: int


@dataclass(frozen=True)
class Attention:
    """L layers of H heads; keys of depths 1 .. `depth`; the first P positions of responses."""

    depth: int
    """Iteration of the queries"""
    ceiling: int
    sequences: int
    """Sequences with a query at that iteration"""
    mean: Floats
    """`[L, H, depth]`: mass, mean over sequences"""
    std: Floats
    """`[L, H, depth]`: one standard deviation over sequences"""
    heads: tuple[Head, ...]
    maps: Floats
    """`[3, depth, P, P]`: mean weight of key position (last axis) for query position; NaN where no query ran"""

    def to_json(self) -> dict[str, Any]:
        """Everything but the maps."""
        chosen = [
            {
                "role": head.role,
                "layer": head.layer,
                "head": head.head,
                "mean": self.mean[head.layer, head.head].tolist(),
                "std": self.std[head.layer, head.head].tolist(),
            }
            for head in self.heads
        ]
        sizes = {"depth": self.depth, "ceiling": self.ceiling, "sequences": self.sequences}
        return {**sizes, "heads": chosen, "mean": self.mean.tolist(), "std": self.std.tolist()}


def attention(
    decoder: LoopedDecoder, batches: Sequence[PackedBatch], positions: int = 128, progress: Progress | None = None
) -> Attention:
    """Attention mass of all heads, and maps of three, along the decider's own routes.

    Queries are those of `query_depth`: of the ceiling, where that is not rare.
    """
    depth, ceiling = query_depth(decoder, batches), decoder.ceiling()
    if depth < 2:
        raise ConfigError("No response token runs a second iteration, so there is no attention across iterations.")
    if not any(decoder.kind.rule.reads_depth(j, depth) for j in range(1, depth)):
        raise ConfigError(
            f"Loop {decoder.kind.name!r} reads keys of its own iteration alone: it has no attention across iterations."
        )
    mass = _Mass(depth)
    _watch(decoder, batches, depth, mass, progress)
    mean, std = mass.over_sequences()
    heads = representative(mean)
    pictures = _Maps(depth, heads, positions)
    _watch(decoder, batches, depth, pictures, progress)
    return Attention(depth, ceiling, mass.sequences, mean, std, heads, pictures.mean())


def representative(mean: Floats) -> tuple[Head, ...]:
    """Three different heads by mass `[L, H, M]`: most on depth 1, least on depth 1, largest entropy over depths.

    A model of fewer than three heads has as many roles as heads.
    """
    heads = mean.shape[1]
    share = mean / mean.sum(-1, keepdims=True)
    entropy = -(share * np.log(np.clip(share, 1e-12, None))).sum(-1)
    chosen: list[Head] = []
    for role, score in zip(ROLES, (share[..., 0], -share[..., 0], entropy), strict=True):
        ranked = np.argsort(-score, axis=None, kind="stable")
        taken = {(head.layer, head.head) for head in chosen}
        free = [divmod(int(place), heads) for place in ranked if divmod(int(place), heads) not in taken]
        if free:
            chosen.append(Head(role, *free[0]))
    return tuple(chosen)


@dataclass
class _Batch:
    """Where responses begin in the batch that runs: documents' names in the visibility's entries are 0 .. D-1."""

    start: NDArray[np.int64]
    """`[D]`: position of the first entry that predicts a response token; -1 without a response"""


class _Mass:
    """Adds up mass per sequence, layer and head."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.sums: dict[tuple[int, int], dict[int, Tensor]] = {}
        """(batch, document) -> layer -> sum over queries `[H, depth]`"""
        self.queries: dict[tuple[int, int], dict[int, int]] = {}
        self.number = -1

    def begin(self, batch: _Batch) -> None:
        self.batch = batch
        self.number += 1

    def __call__(self, layer: int, query: Entries, key: Entries, weights: Tensor) -> None:
        document = int(query.document[0])
        rows = _responding(self.batch, query)
        if not bool(rows.any()):
            return
        one_hot = torch.nn.functional.one_hot(key.depth - 1, self.depth).to(weights.dtype)
        added = (weights[:, rows] @ one_hot).sum(1).double().cpu()
        name = (self.number, document)
        sums, queries = self.sums.setdefault(name, {}), self.queries.setdefault(name, {})
        sums[layer] = sums[layer] + added if layer in sums else added
        queries[layer] = queries.get(layer, 0) + int(rows.sum())

    @property
    def sequences(self) -> int:
        return len(self.sums)

    def over_sequences(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each sequence's mean mass, both `[L, H, depth]`."""
        each = np.array(
            [
                [(sums[layer] / self.queries[name][layer]).numpy() for layer in sorted(sums)]
                for name, sums in self.sums.items()
            ]
        )
        return each.mean(0), each.std(0, ddof=1) if len(each) > 1 else np.zeros(each.shape[1:])


class _Maps:
    """Adds up the chosen heads' weights by position in the response."""

    def __init__(self, depth: int, heads: Sequence[Head], positions: int) -> None:
        self.depth, self.heads, self.positions = depth, heads, positions
        self.sums = np.zeros((len(heads), depth, positions, positions))
        self.queries = np.zeros((len(heads), positions))

    def begin(self, batch: _Batch) -> None:
        self.batch = batch

    def __call__(self, layer: int, query: Entries, key: Entries, weights: Tensor) -> None:
        wanted = [i for i, head in enumerate(self.heads) if head.layer == layer]
        start = int(self.batch.start[int(query.document[0])])
        if not wanted or start < 0:
            return
        at, read = (query.position - start).cpu().numpy(), (key.position - start).cpu().numpy()
        rows = np.flatnonzero((at >= 0) & (at < self.positions))
        columns = np.flatnonzero((read >= 0) & (read < self.positions))
        depth = key.depth.cpu().numpy()[columns] - 1
        for i in wanted:
            part = weights[self.heads[i].head].cpu().numpy()[np.ix_(rows, columns)]
            np.add.at(self.queries[i], at[rows], 1)
            target = (depth[None, :], at[rows][:, None], read[columns][None, :])
            np.add.at(self.sums[i], target, part)

    def mean(self) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.where(self.queries[:, None, :, None] > 0, self.sums / self.queries[:, None, :, None], np.nan)


def _responding(batch: _Batch, query: Entries) -> Tensor:
    """bool `[n]`: queries of one document that lie in its response."""
    start = int(batch.start[int(query.document[0])])
    return query.position >= start if start >= 0 else torch.zeros_like(query.position, dtype=torch.bool)


class _Watcher(Protocol):
    """An observer that is told which batch runs."""

    def begin(self, batch: _Batch) -> None: ...

    def __call__(self, layer: int, query: Entries, key: Entries, weights: Tensor) -> None: ...


@torch.no_grad()
def _watch(
    decoder: LoopedDecoder, batches: Sequence[PackedBatch], depth: int, watcher: _Watcher, progress: Progress | None
) -> None:
    """Run every batch with `watcher` seeing the weights of its queries at `depth`."""
    backend = observing(watcher, depth, decoder.looped.start, decoder.head_weight.device)
    for batch in batches:
        batch = batch.to(decoder.head_weight.device)
        watcher.begin(_Batch(response_starts(batch)))
        decoder(
            tokens_of(batch),
            TargetReader(decoder.head_weight, batch.targets, False),
            LoopSettings(run_all=_forced(decoder, batch), attention=backend),
        )
        if progress is not None:
            progress(len(batch))


def response_starts(batch: PackedBatch) -> NDArray[np.int64]:
    """`[D]`: position of the first entry with a target in each document, -1 where there is none."""
    starts = np.full(batch.documents, -1, dtype=np.int64)
    rows = (batch.targets != IGNORE).nonzero()[:, 0].flip(0)
    starts[batch.document[rows].cpu().numpy()] = batch.position[rows].cpu().numpy()
    return starts


@torch.no_grad()
def query_depth(decoder: LoopedDecoder, batches: Sequence[PackedBatch]) -> int:
    """The deepest iteration that response tokens of at least `REACHED` of the sequences execute.

    Where no iteration after the first is that common, the deepest that any response token executes.
    """
    reached = np.concatenate([_deepest_of_each(decoder, batch) for batch in batches])
    common = [m for m in range(2, decoder.ceiling() + 1) if (reached >= m).mean() >= REACHED]
    return max(common, default=int(reached.max()))


def _deepest_of_each(decoder: LoopedDecoder, batch: PackedBatch) -> NDArray[np.int64]:
    """`[D]`: the deepest iteration of a token with a target, document by document."""
    batch = batch.to(decoder.head_weight.device)
    reader = TargetReader(decoder.head_weight, batch.targets, False)
    run = decoder(tokens_of(batch), reader, LoopSettings(run_all=_forced(decoder, batch)))
    executed = torch.where(batch.targets != IGNORE, run.executed, 0)
    deepest = torch.zeros(batch.documents, dtype=torch.long, device=executed.device)
    return deepest.scatter_reduce(0, batch.document, executed, "amax").cpu().numpy()


def _forced(decoder: LoopedDecoder, batch: PackedBatch) -> Tensor | None:
    return batch.targets == IGNORE if decoder.kind.prefill_runs_all else None
