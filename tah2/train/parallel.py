"""One model on several processes: who is who, how the decoder is sharded, how gradients are summed and clipped.

Sharding is FSDP2: every block is a unit, and the root holds embeddings, head, norm and the loop's own parts. Three
facts of the loop shape it.

- A block runs once per pass, the head is read between and after passes: `gathered` keeps the root whole from before
  its forward until backward is over, so that `decoder.head_weight` is usable (outside it is this rank's shard alone).
- Losses are divided by the supervised tokens of the whole global batch, so gradients are *summed* over ranks.
- Ranks may use different parts (a gate without labels on one of them): a parameter without gradient counts as zero.

The order is: activation checkpointing (inside the loop, per block call), `compile_blocks`, `shard`, the optimizer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tah2.config.strict import ConfigError
from tah2.model.loop import LoopedDecoder
from tah2.objective.pooling import pool_sum
from tah2.train.precision import computing_in

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a slower rank (rank 0 fits the updater's start and writes the model alone)."""


@dataclass(frozen=True)
class World:
    """The data-parallel processes as one of them sees it; `group` is None where it is alone.

    As a context manager it leaves the process group at the end.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None

    @classmethod
    def from_environment(
        cls, device: str | None = None, environment: Mapping[str, str] = os.environ, timeout: timedelta = TIMEOUT
    ) -> World:
        """What torchrun says (RANK, WORLD_SIZE, LOCAL_RANK); without it, one process and no process group."""
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            rank, size, local = (int(environment.get(name, default)) for name, default in _TORCHRUN)
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error}).") from None
        place = torch.device(kind)
        if place.type == "cuda":
            place = _own_gpu(place, local)
        if size == 1:
            return cls(device=place)
        dist.init_process_group(_BACKENDS[place.type], rank=rank, world_size=size, timeout=timeout)
        return cls(rank, size, local, place, dist.group.WORLD)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_tensor(self, values: Tensor) -> Tensor:
        """The sum over ranks of `values` (same shape on every rank)."""
        return pool_sum(values, self.group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            dist.barrier(self.group, device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    @contextmanager
    def patient(self, patience: timedelta) -> Iterator[Callable[[], object]]:
        """A barrier, for use inside, that waits so long for slower ranks; all ranks enter it at about the same time."""
        if self.group is None:
            yield self.barrier
            return
        group = dist.new_group(backend="gloo", timeout=patience)
        try:
            yield lambda: dist.barrier(group)
        finally:
            dist.destroy_process_group(group)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Checkpoints are written from CPU memory, so GPUs need gloo beside nccl."""


def _own_gpu(device: torch.device, local_rank: int) -> torch.device:
    """Each local process has a GPU of its own, unless a process alone names one."""
    index = device.index if device.index is not None else local_rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"Local process {local_rank} has no GPU of its own: this machine shows {torch.cuda.device_count()}; "
            "start at most as many processes per machine."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(frozen=True)
class RankPeers:
    """`Peers` of the loop: every rank runs a pass as soon as one rank needs it."""

    world: World

    def any(self, here: bool) -> bool:
        if self.world.group is None:
            return here
        flag = torch.tensor(int(here), device=self.world.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.world.group)
        return bool(flag)


def shard(
    decoder: LoopedDecoder,
    world: World,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> LoopedDecoder:
    """Place the decoder on the world's device and shard it over the ranks, in place; rank 0's weights count.

    Parameters keep their dtype (fp32 masters), computation runs in `compute_dtype`, gradients are reduced in fp32.
    `reshard_after_forward` frees a block's gathered weights between its uses (less memory, more communication).
    One process needs no sharding.
    """
    if world.group is None:
        return decoder.to(world.device)
    if compute_dtype == torch.float32:
        compute_dtype = None
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(f"Training on several processes needs torch 2.13, not {torch.__version__}.")
    mesh = init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("data",))
    for tensor in [*decoder.parameters(), *decoder.buffers()]:
        tensor.data = tensor.data.to(world.device)
        dist.broadcast(tensor.data, 0, group=world.group)
    # Casting inputs would copy the reader and the settings; every float input of a block has the right dtype anyhow.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None, cast_forward_inputs=False
    )
    for block in decoder.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    decoder.to(world.device)
    for unit in _units(decoder):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    # A block returns its value heads as a view; nothing ever writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return decoder


def _units(decoder: nn.Module) -> list[FSDPModule]:
    return [module for module in decoder.modules() if isinstance(module, FSDPModule)]


def settle(decoder: nn.Module) -> None:
    """Return every parameter to its shard, so that parameters and optimizer are the same objects again."""
    for unit in _units(decoder):
        unit.reshard()


@contextmanager
def gathered(decoder: nn.Module, compute_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Around one micro-batch, forward and backward, or a validation: `decoder.head_weight` is whole inside.

    One process computes in `compute_dtype` here; a sharded decoder in what `shard` was told.
    """
    if not isinstance(decoder, FSDPModule):
        with nullcontext() if compute_dtype is None else computing_in(compute_dtype, decoder):
            yield
        return
    decoder.unshard()
    try:
        yield
    finally:
        settle(decoder)


def accumulate(decoder: nn.Module, last: bool) -> None:
    """Before a micro-batch: sum its gradients over ranks only at the `last` one of the step.

    Saves communication; costs one whole gradient of memory per rank. Without this call every micro-batch reduces.
    """
    for unit in _units(decoder):
        unit.set_requires_gradient_sync(last, recurse=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, world: World) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before, fp32 scalar.

    With sharded parameters each rank holds its shard of every gradient; without a group, gradients are whole.
    """
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).to(world.device).float() ** 2
    norm = world.sum_tensor(square).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


class _Outside:
    """A call that the compiler leaves alone: attention over ragged pieces is Python and differs from pass to pass."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def compile_blocks(decoder: LoopedDecoder, backend: str = "inductor") -> None:
    """Compile what surrounds attention in every block, for any number of entries; before `shard`."""
    for block in decoder.layers:
        compiled = torch.compile(block.forward, dynamic=True, backend=backend)

        def forward(
            x: Tensor, cosine: Tensor, sine: Tensor, attend: Callable[..., Any], compiled: Any = compiled
        ) -> tuple[Tensor, Tensor, Tensor]:
            output: tuple[Tensor, Tensor, Tensor] = compiled(x, cosine, sine, _Outside(attend))
            return output

        block.forward = forward
