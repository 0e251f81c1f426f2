"""Documents laid end to end: a ragged micro-batch without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tah2.data.store import Sample

IGNORE = -100


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of N tokens from D documents; all tensors are long `[N]`."""

    ids: Tensor
    targets: Tensor
    """The next token's id, or -100 where it has no loss; the last token of a document has no target."""
    document: Tensor
    """0 .. D-1, each document contiguous."""
    position: Tensor
    """From 0 in every document."""
    samples: tuple[str, ...] = ()
    """The D names of the documents."""
    tags: Tensor | None = None
    """The kind of each target, where the data tells kinds apart; 0 without a target."""

    def __len__(self) -> int:
        return self.ids.numel()

    @cached_property
    def supervised_tokens(self) -> int:
        return int((self.targets != IGNORE).sum())

    @property
    def documents(self) -> int:
        return int(self.document[-1]) + 1

    @property
    def is_placeholder(self) -> bool:
        return not self.samples

    def to(self, device: torch.device | str) -> PackedBatch:
        names = ("ids", "targets", "document", "position")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        tags = None if self.tags is None else self.tags.to(device, non_blocking=True)
        return replace(self, **moved, tags=tags)

    @staticmethod
    def placeholder(tagged: bool = False) -> PackedBatch:
        """One token without a target: what a rank without work runs, so that all ranks run as many passes."""
        zero = torch.zeros(1, dtype=torch.long)
        return PackedBatch(zero, torch.full_like(zero, IGNORE), zero, zero, (), zero if tagged else None)


def pack(samples: Sequence[Sample]) -> PackedBatch:
    """Lay `samples` (at least one) end to end."""
    lengths = np.asarray([len(sample) for sample in samples], np.int64)
    ends = np.cumsum(lengths)
    ids = np.concatenate([sample.ids for sample in samples]).astype(np.int64)
    is_target = np.concatenate([sample.mask for sample in samples])
    has_target = np.append(is_target[1:], False)
    has_target[ends - 1] = False
    tags = None
    if all(sample.tags is not None for sample in samples):
        kinds = np.concatenate([sample.tags for sample in samples if sample.tags is not None]).astype(np.int64)
        tags = torch.from_numpy(np.where(has_target, np.roll(kinds, -1), 0))
    return PackedBatch(
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(np.where(has_target, np.roll(ids, -1), IGNORE)),
        document=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        position=torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)),
        samples=tuple(sample.name for sample in samples),
        tags=tags,
    )


def pack_plainly(samples: Sequence[Sample]) -> PackedBatch:
    """The plain twin of `pack`: one token after another."""
    rows = []
    for number, sample in enumerate(samples):
        for position in range(len(sample)):
            follows = position + 1 < len(sample) and bool(sample.mask[position + 1])
            target = int(sample.ids[position + 1]) if follows else IGNORE
            tag = int(sample.tags[position + 1]) if follows and sample.tags is not None else 0
            rows.append((int(sample.ids[position]), target, number, position, tag))
    ids, targets, document, position, tags = torch.tensor(rows, dtype=torch.long).T
    tagged = all(sample.tags is not None for sample in samples)
    names = tuple(sample.name for sample in samples)
    return PackedBatch(ids, targets, document, position, names, tags if tagged else None)
