"""GGUF files: a tiny one written here, and the real SmolLM2 in `test_real_model.py`."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tah2
from tah2.config.strict import ConfigError
from tah2.model.start import StartConfig

LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """GGUF's Llama keeps the two halves of each rotary pair side by side."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    import gguf

    config, tensors = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*map(chr, range(97, 94 + config.vocab_size)), "ab", "bc", "<end>"])
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(config.vocab_size - 1)
    writer.add_eos_token_id(config.vocab_size - 1)
    placed = {"token_embd": tensors["model.embed_tokens.weight"], "output_norm": tensors["model.norm.weight"]}
    placed["output"] = tensors["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            placed[f"blk.{layer}.{theirs}"] = tensors[f"model.layers.{layer}.{ours}.weight"]
        for name, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            placed[f"blk.{layer}.{name}"] = interleaved(placed[f"blk.{layer}.{name}"], heads)
    for name, tensor in placed.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_a_gguf_file_converts_with_its_tokenizer(tmp_path: Path):
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    shape = {"vocab_size": 26, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, initializer_range=0.3)).eval()
    write_gguf(model, tmp_path / "model.gguf")
    tah2.convert(tmp_path / "model.gguf", tmp_path / "out", updater_width=4, start=StartConfig(steps=1))
    looped, ids = tah2.load(tmp_path / "out"), torch.tensor([[3, 1, 4, 1, 5]])
    torch.testing.assert_close(looped(ids, max_depth=1).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert looped.config.eos_token_id == 25
    assert not any("quantization" in key for key in looped.config.backbone)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model.gguf").write_bytes(b"")
    imported = builtins.__import__

    def without_gguf(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(ConfigError, match="install tah2 with its 'gguf' extra"):
        tah2.convert(tmp_path / "model.gguf", tmp_path / "out")
