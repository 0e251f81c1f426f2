"""AdamW with parameter groups, and the cosine schedule with warm-up and a floor."""

from __future__ import annotations

import math

import torch
from torch import nn

from tah2.config.strict import ConfigError
from tah2.model.loop import LoopedDecoder
from tah2.train.config import OptimizerSection


def build_optimizer(decoder: LoopedDecoder, config: OptimizerSection) -> torch.optim.AdamW:
    """Matrices decay, vectors (norm scales, biases) and embeddings do not; the gate may learn at its own rate.

    Every group remembers its peak rate as `peak`, which the schedule scales.
    """
    if config.gate_learning_rate is not None and decoder.gate is None:
        raise ConfigError(
            f"Loop {decoder.kind.name!r} has no gate, so 'optimizer.gate_learning_rate' has no use; leave it out."
        )
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in decoder.named_parameters():
        if not parameter.requires_grad:
            continue
        gate = name.startswith("gate.") and config.gate_learning_rate is not None
        rate = config.gate_learning_rate if gate and config.gate_learning_rate else config.learning_rate
        decay = config.weight_decay if parameter.ndim > 1 and name != "embed_tokens.weight" else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    described = [
        {"params": parameters, "lr": rate, "peak": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]
    return torch.optim.AdamW(described, betas=config.betas, eps=config.epsilon, fused=True)


def schedule(config: OptimizerSection, step: int, steps: int) -> float:
    """The factor on the peak rate at `step` (from 0) of `steps`: linear warm-up, then a cosine to the floor."""
    warmup = math.ceil(config.warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.minimum_ratio + (1 - config.minimum_ratio) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
