"""The decoder that every loop repeats: Qwen3, Qwen2/2.5 and Llama-style blocks over flat entries.

Blocks are functional where gradients flow: hidden states and the pass's attention come in, hidden states and
the new keys and values go out. Nothing is appended to a cache inside a block, so a block may be checkpointed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tah2.config.backbone import BackboneConfig
from tah2.model.attention import Attend
from tah2.model.parts import RMSNorm, SwiGLU
from tah2.model.rotary import rotate


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; biases and q/k norms as the family has them."""

    def __init__(self, backbone: BackboneConfig) -> None:
        super().__init__()
        width, bias = backbone.hidden_size, backbone.qkv_bias
        self.head_dim = backbone.head_dim
        self.q_proj = nn.Linear(width, backbone.query_width, bias=bias)
        self.k_proj = nn.Linear(width, backbone.kv_width, bias=bias)
        self.v_proj = nn.Linear(width, backbone.kv_width, bias=bias)
        self.o_proj = nn.Linear(backbone.query_width, width, bias=backbone.output_bias)
        self.q_norm = RMSNorm(self.head_dim, backbone.rms_norm_eps) if backbone.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, backbone.rms_norm_eps) if backbone.qk_norm else nn.Identity()

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x `[N, d]` -> rotated query `[N, heads, head_dim]`, rotated key and value `[N, kv_heads, head_dim]`."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(query, cosine, sine), rotate(key, cosine, sine), value


class Block(nn.Module):
    """Pre-norm attention and SwiGLU MLP."""

    def __init__(self, backbone: BackboneConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.self_attn = Attention(backbone)
        self.post_attention_layernorm = RMSNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.mlp = SwiGLU(backbone.hidden_size, backbone.intermediate_size, bias=backbone.mlp_bias)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> tuple[Tensor, Tensor, Tensor]:
        """x `[N, d]` -> output `[N, d]`, rotated key and value `[N, kv_heads, head_dim]`."""
        query, key, value = self.before(x, cosine, sine)
        return self.after(x, attend(query, key, value)), key, value

    def before(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attention takes; see `Attention.project`."""
        return self.self_attn.project(self.input_layernorm(x), cosine, sine)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output, from its input `[N, d]` and what attention gave, `[N, heads, head_dim]`."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


@torch.no_grad()
def initialise_backbone(module: nn.Module, std: float) -> None:
    """Random start of a backbone that is not loaded from a checkpoint: normal weights, zero biases, unit norms."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, RMSNorm):
            nn.init.ones_(part.weight)
