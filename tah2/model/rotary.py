"""Rotary position embeddings for flat entries, with every scaling that the supported families ship.

The frequencies come from transformers' own `ROPE_INIT_FUNCTIONS`, so a checkpoint means here what it
means there. Two scalings depend on how long the document is ("dynamic", "longrope"); for them an entry's
frequencies follow the extent (length so far) of its own document, so that packing changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tah2.config.backbone import BackboneConfig

_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Rotary:
    """Cosines and sines of positions; not a module, so that its fp32 frequencies survive casts and the meta device."""

    def __init__(self, backbone: BackboneConfig) -> None:
        self.backbone = backbone
        self.depends_on_length = backbone.rope["rope_type"] in _LENGTH_DEPENDENT
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, position: Tensor, document: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position and document long `[N]` -> cosines and sines `[N, head_dim]`."""
        frequencies, scale = self._by_length(position, document) if self.depends_on_length else self._table(position)
        angles = position[:, None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _table(self, position: Tensor) -> tuple[Tensor, float]:
        device = position.device
        if device not in self._frequencies:
            frequencies, scale = rope_frequencies(self.backbone)
            self._frequencies[device] = frequencies.to(device), scale
        return self._frequencies[device]

    def _by_length(self, position: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
        """Each entry's frequencies `[N, head_dim / 2]` and scale `[N, 1]`."""
        lengths, row = _extents(position, document).unique(return_inverse=True)
        tables = [rope_frequencies(self.backbone, length) for length in lengths.tolist()]
        frequencies = torch.stack([frequencies for frequencies, _ in tables]).to(position.device)
        scales = torch.tensor([[scale] for _, scale in tables], device=position.device)
        return frequencies[row], scales[row]


def rope_frequencies(backbone: BackboneConfig, length: int | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` and the scale of cosines and sines, for documents of `length`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = backbone.rope["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, backbone.head_dim, 2, dtype=torch.int64, device="cpu").float() / backbone.head_dim
        return 1.0 / backbone.rope["rope_theta"] ** exponents, 1.0
    config = LlamaConfig(
        hidden_size=backbone.query_width,
        num_attention_heads=backbone.num_heads,
        num_key_value_heads=backbone.num_kv_heads,
        head_dim=backbone.head_dim,
        max_position_embeddings=backbone.max_position_embeddings,
        rope_parameters=dict(backbone.rope),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)
    return frequencies.float(), float(scale)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `[N, heads, head_dim]` by per-entry cosines and sines `[N, head_dim]`."""
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine[:, None] + swapped * sine[:, None]


def _extents(position: Tensor, document: Tensor) -> Tensor:
    """Each entry's document length as far as these entries show it: the largest position plus one."""
    names, index = document.unique(return_inverse=True)
    largest = torch.zeros(names.numel(), dtype=position.dtype, device=position.device)
    largest = largest.scatter_reduce(0, index, position + 1, reduce="amax")
    return largest[index]
