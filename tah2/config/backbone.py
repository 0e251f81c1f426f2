"""The shape of a pretrained backbone, read from the `config.json` that its family ships.

Three families share one decoder: Qwen3 (q/k norm), Qwen2/2.5 (q/k/v biases) and Llama, which
SmolLM2 uses. What differs between them is stated here as data; the decoder asks no family name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tah2.config.strict import ConfigError, suggestion

FAMILIES = ("qwen3", "qwen2", "llama")
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class BackboneConfig:
    """A decoder-only transformer: `num_layers` pre-norm blocks of GQA attention and a SwiGLU MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """transformers' `rope_parameters`: `rope_type`, `rope_theta` and what that scaling needs."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"Unknown backbone family {self.family!r}{suggestion(self.family, FAMILIES)}.")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Backbone {name} must be at least 1, not {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly.")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, not {self.head_dim}.")
        if self.rope.get("rope_type") not in ROPE_TYPES:
            raise ConfigError(
                f"RoPE scaling {self.rope.get('rope_type')!r} is not supported; use one of {', '.join(ROPE_TYPES)}."
            )

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BackboneConfig:
        """Translate a Hugging Face `config.json` of a supported family (transformers 4 or 5 spelling)."""
        family = config.get("model_type", "")
        if family not in FAMILIES:
            raise ConfigError(
                f"Backbones of type {family!r} are not supported; "
                f"use a Qwen3, Qwen2/2.5 or Llama/SmolLM checkpoint (model_type {', '.join(FAMILIES)})."
            )
        _refuse_unsupported(config)
        lacking = [name for name in _REQUIRED if config.get(name) is None]
        if lacking:
            raise ConfigError(f"The backbone's config lacks {', '.join(map(repr, lacking))}.")
        heads = int(config["num_attention_heads"])
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or (128 if family == "qwen3" else int(config["hidden_size"]) // heads)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            rope=_rope_parameters(config),
        )


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; version 4 wrote `rope_theta` beside `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    return rope


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError("Sliding-window attention is not supported; use a checkpoint with full attention.")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError("Rotary embeddings of a part of each head are not supported (partial_rotary_factor).")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"Only SwiGLU (hidden_act 'silu') backbones are supported, not {config['hidden_act']!r}.")


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> BackboneConfig:
    return BackboneConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        qk_norm=True,
        max_position_embeddings=32768,
        rope={"rope_type": "default", "rope_theta": 1000000.0},
    )


PRESETS: dict[str, BackboneConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "smollm2-135m": BackboneConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope={"rope_type": "default", "rope_theta": 100000.0},
    ),
}
"""Published shapes by name, for accounting without a checkpoint."""


def preset(name: str) -> BackboneConfig:
    key = name.lower().removeprefix("qwen/").removesuffix("-base")
    if key not in PRESETS:
        raise ConfigError(f"Unknown backbone {name!r}{suggestion(key, PRESETS)}.")
    return PRESETS[key]
