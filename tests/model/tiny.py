"""Small random models that every test of the room shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.loop import LoopedDecoder, Tokens

TINY = BackboneConfig("qwen3", 23, 16, 20, 4, 4, 2, 6, qk_norm=True, initializer_range=0.3)

VARIANTS: dict[str, dict[str, Any]] = {
    "standard": {"kind": "standard"},
    "tah2": {"kind": "tah2"},
    "tah2, last output": {"kind": "tah2", "output": "last"},
    "tah2, uniform output": {"kind": "tah2", "output": "uniform-mixture"},
    "tah2, top-k embedding": {"kind": "tah2", "reentry": "top-k-embedding", "embedding_top_k": 5},
    "tah2-fixed": {"kind": "tah2-fixed"},
    "ouro": {"kind": "ouro"},
    "ouro, every depth": {"kind": "ouro", "output": "uniform-mixture"},
    "ouro-adaptive": {"kind": "ouro-adaptive"},
    "huginn": {"kind": "huginn", "prelude_layers": 1, "coda_layers": 1},
}
"""Every loop kind, and every option that changes what it computes."""


def tiny_loop(max_depth: int = 3, **options: Any) -> LoopConfig:
    widths = {"updater_width": 5, "decider_width": 6, "decider_top_k": 4}
    return LoopConfig(**{"max_depth": max_depth, **widths, **options})


def tiny_model(loop: LoopConfig | None = None, seed: int = 0, **backbone: Any) -> LoopedDecoder:
    """A random decoder whose gate decides for itself: about half of the tokens continue."""
    torch.manual_seed(seed)
    model = LoopedDecoder(replace(TINY, **backbone), loop or tiny_loop())
    model.reset()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)
            if name.startswith("gate."):
                parameter.add_(0.5 * torch.randn_like(parameter))
            if name in ("reentry.inject_bias", "reentry.retain_bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def random_documents(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(TINY.vocab_size, (length,), generator=generator) for length in lengths]


def random_tokens(*lengths: int, seed: int = 0) -> Tokens:
    return Tokens.pack(random_documents(*lengths, seed=seed))
