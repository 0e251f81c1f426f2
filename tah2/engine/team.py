"""The processes that run one engine together, as one of them sees it; most engines are alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tah2.config.strict import ConfigError

Value = TypeVar("Value")

PATIENCE = timedelta(days=365)
"""How long a rank waits for rank 0's word: an idle server says nothing."""


@dataclass(frozen=True)
class Team:
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """For tensors on the model's device; None where the rank is alone."""
    words: dist.ProcessGroup | None = None
    """For what is agreed on in CPU memory."""

    @classmethod
    def join(cls, size: int) -> Team:
        """The team of all processes of torch.distributed, which is started as torchrun says where nobody has."""
        if size == 1:
            return cls()
        running = dist.is_initialized()
        found = dist.get_world_size() if running else int(os.environ.get("WORLD_SIZE", "1"))
        if found != size:
            raise ConfigError(
                f"tensor_parallel_size={size} needs {size} processes, not {found}; "
                f"start the program with torchrun --nproc-per-node {size}."
            )
        if not running:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size, dist.group.WORLD, dist.new_group(backend="gloo", timeout=PATIENCE))

    @property
    def alone(self) -> bool:
        return self.size == 1

    def place(self, device: str | torch.device | None = None) -> torch.device:
        """Where this rank computes; GPUs go to local processes in order, unless one is named."""
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if str(place) == "cuda" and not self.alone:
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
        return place

    def share(self, count: int) -> slice:
        """This rank's part of `count` equal things."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's `values`, all of one shape, in order of rank."""
        if self.group is None:
            return [values]
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values, group=self.group)
        return parts

    def lead(self, values: Tensor) -> Tensor:
        """Rank 0's `values`, in place."""
        if self.group is not None:
            values = values.contiguous()
            dist.broadcast(values, 0, group=self.group)
        return values

    def agree(self, value: Value) -> Value:
        """Rank 0's `value`, whatever the others say."""
        if self.words is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self.words, device=torch.device("cpu"))
        return box[0]

    def first(self, compute: Callable[[], Value]) -> Value:
        """What `compute` gives on rank 0, which alone calls it; if it fails there, it has failed everywhere."""
        if self.words is None:
            return compute()
        value, error = None, None
        if self.rank == 0:
            try:
                value = compute()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        value, error = self.agree((value, error))
        if error is not None:
            raise RuntimeError(error)
        return value  # type: ignore[return-value]  # without an error there is a value

    def least(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        if self.words is None:
            return number
        held = torch.tensor(number)
        dist.all_reduce(held, dist.ReduceOp.MIN, group=self.words)
        return int(held)


ALONE = Team()
