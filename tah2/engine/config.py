"""How much one engine may use, and which of its methods are on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tah2.config.strict import ConfigError


@dataclass(frozen=True)
class EngineConfig:
    max_num_seqs: int = 64
    """Requests that run at the same time."""
    max_batch_tokens: int = 512
    """Entries of one pass: decode entries first, prompt chunks in what is left."""
    max_model_len: int | None = None
    """Longest prompt plus output; None: the checkpoint's."""
    kv_slots: int | None = None
    """Entries (token, depth) that the pool holds; None: as many as `kv_memory_gib` or the device's memory allows."""
    kv_memory_gib: float | None = None
    """Memory of the pool; None: 2 GiB on a CPU, `gpu_memory_utilization` of what is free on a GPU."""
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    wavefront_rows: int = 8
    """Run drafts of next tokens while a pass has at most this many rows, drafts included; 0 turns them off."""
    admission_horizon: int = 128
    """Output tokens per request that admission sets room aside for, at the depth that requests have shown."""
    kernels: Literal["auto", "off"] = "auto"
    """"auto": packed fp32 weights and compiled kernels where the CPU and a compiler allow, CUDA graphs on a GPU; the
    same results up to rounding."""
    weight_storage: Literal["fp32", "bf16", "int8"] = "fp32"
    """How packed weights are stored on a CPU; the smaller ones trade accuracy for memory traffic."""
    tensor_parallel_size: int = 1
    """Processes that hold the model between them; start them with torchrun."""
    seed: int | None = None
    """Where seeds of requests without one come from; None: from the operating system."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_tokens", "max_model_len", "kv_slots", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        for name in ("wavefront_rows", "admission_horizon"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}.")
        if self.tensor_parallel_size > 1 and self.weight_storage != "fp32":
            raise ConfigError("weight_storage is for one process on a CPU; leave it out with tensor_parallel_size.")
        if self.kv_memory_gib is not None and not self.kv_memory_gib > 0:
            raise ConfigError(f"kv_memory_gib must be positive, not {self.kv_memory_gib}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], not {self.gpu_memory_utilization}.")
