"""Rotary position embeddings for flat entries, with every scaling that the supported families ship.

The frequencies come from transformers' own `ROPE_INIT_FUNCTIONS`, so a checkpoint means here what it
means there. Two scalings depend on how long the document is ("dynamic", "longrope"); for them an entry's
frequencies follow the extent (length so far) of its own document, so that packing changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tah2.config.backbone import BackboneConfig

_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Rotary(nn.Module):
    """Cosines and sines `[N, head_dim]` of positions `[N]`."""

    def __init__(self, backbone: BackboneConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.depends_on_length = backbone.rope["rope_type"] in _LENGTH_DEPENDENT
        # Not a buffer: frequencies must stay fp32 when the model is cast, and survive meta-device construction.
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, float]] = {}

    def forward(self, position: Tensor, document: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not self.depends_on_length:
            frequencies, scale = self._table(0, position.device)
            return self._waves(position, frequencies, scale, dtype)
        extent = _extents(position, document)
        cosine = torch.empty(position.numel(), self.backbone.head_dim, device=position.device, dtype=dtype)
        sine = torch.empty_like(cosine)
        for length in extent.unique().tolist():
            rows = extent == length
            frequencies, scale = self._table(length, position.device)
            cosine[rows], sine[rows] = self._waves(position[rows], frequencies, scale, dtype)
        return cosine, sine

    def _table(self, length: int, device: torch.device) -> tuple[Tensor, float]:
        key = (length, device)
        if key not in self._tables:
            if len(self._tables) > 64:
                self._tables.clear()
            self._tables[key] = rope_frequencies(self.backbone, length, device)
        return self._tables[key]

    @staticmethod
    def _waves(position: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = position[:, None].float() * frequencies[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rope_frequencies(backbone: BackboneConfig, length: int, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` and the scale of cosines and sines, for documents of `length`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = backbone.rope["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, backbone.head_dim, 2, dtype=torch.int64).float() / backbone.head_dim
        return (1.0 / backbone.rope["rope_theta"] ** exponents).to(device), 1.0
    config = LlamaConfig(
        hidden_size=backbone.hidden_size,
        num_attention_heads=backbone.num_heads,
        num_key_value_heads=backbone.num_kv_heads,
        head_dim=backbone.head_dim,
        max_position_embeddings=backbone.max_position_embeddings,
        rope_parameters=dict(backbone.rope),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length or None)
    return frequencies.float().to(device), float(scale)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `[N, heads, head_dim]` by per-entry cosines and sines `[N, head_dim]`."""
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine[:, None] + swapped * sine[:, None]


def _extents(position: Tensor, document: Tensor) -> Tensor:
    """Each entry's document length as far as these entries show it: the largest position plus one."""
    names, index = document.unique(return_inverse=True)
    largest = torch.zeros(names.numel(), dtype=position.dtype, device=position.device)
    largest = largest.scatter_reduce(0, index, position + 1, reduce="amax")
    return largest[index]
