"""Logits equal transformers' own Qwen3, Qwen2 and Llama classes on random tiny configs of each family."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tah2.config.backbone import PRESETS, BackboneConfig, preset
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.loop import LoopedDecoder, LoopSettings, Tokens
from tah2.model.scoring import score

CLASSES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
SHAPE = {"vocab_size": 37, "num_hidden_layers": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, all options": {
        "factor": 3.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.9,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def theirs(family: str, **options: Any) -> PreTrainedModel:
    """A random model of the family, with biases and norms that are not at their neutral start."""
    torch.manual_seed(0)
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**{**SHAPE, **options}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return model


def ours(model: PreTrainedModel, config: dict[str, Any] | None = None) -> LoopedDecoder:
    backbone = BackboneConfig.from_hf(config or model.config.to_dict())
    decoder = LoopedDecoder(backbone, LoopConfig("standard"))
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    if backbone.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    decoder.load_state_dict(weights, strict=True)
    return decoder


@torch.no_grad()
def assert_equal_logits(model: PreTrainedModel, decoder: LoopedDecoder, *lengths: int, offset: int = 0) -> None:
    documents = [torch.randint(SHAPE["vocab_size"], (length,)) for length in lengths]
    positions = [torch.arange(length) + offset for length in lengths]
    expected = [
        model(ids[None], position_ids=position[None]).logits[0]
        for ids, position in zip(documents, positions, strict=True)
    ]
    packed = Tokens.pack(documents)
    packed = Tokens(packed.ids, packed.document, torch.cat(positions))
    for attention in ("dense", "tiles"):
        logits = score(decoder, packed, settings=LoopSettings(attention=attention)).logits
        torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)


def random_shapes(count: int) -> list[dict[str, Any]]:
    """Families, head sharing, head widths, ties and biases, drawn once and for all."""
    draw = random.Random(0)
    shapes = []
    for i in range(count):
        family = list(CLASSES)[i % 3]
        kv_heads = draw.choice([1, 2, 3])
        heads = kv_heads * draw.choice([1, 2, 3])
        head_dim = draw.choice([2, 4, 8])
        options: dict[str, Any] = {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": draw.choice([5, 16]),
            "tie_word_embeddings": draw.random() < 0.5,
            "rms_norm_eps": draw.choice([1e-6, 1e-3]),
            "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4, 1e6])},
            "hidden_size": heads * head_dim,
        }
        if family != "qwen2":
            options["attention_bias"] = draw.random() < 0.5
            options["head_dim"] = head_dim
            options["hidden_size"] = heads * draw.choice([head_dim, 2, 5])
        if family == "llama":
            options["mlp_bias"] = draw.random() < 0.5
        shapes.append({"family": family, **options})
    return shapes


@pytest.mark.parametrize("shape", random_shapes(18), ids=lambda shape: shape["family"])
def test_random_shapes_of_every_family(shape: dict[str, Any]):
    model = theirs(**shape)
    assert_equal_logits(model, ours(model), 9, 1, 13)


@pytest.mark.parametrize("scaling", ROPE)
@pytest.mark.parametrize("family", CLASSES)
def test_every_rope_scaling(family: str, scaling: str):
    """Packed documents on both sides of the pretrained length: each is treated as if it were alone."""
    rope = {"rope_type": scaling.split(",")[0], "rope_theta": 1000.0, **ROPE[scaling]}
    width = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    decoder = None
    for lengths in ((9,), (30,), (80,)):  # a fresh model each: theirs remembers the longest input that it saw
        model = theirs(family, **width, head_dim=8, rope_parameters=rope)
        decoder = decoder or ours(model)
        assert_equal_logits(model, decoder, *lengths)
    with torch.no_grad():
        documents = [torch.randint(SHAPE["vocab_size"], (length,)) for length in (9, 30, 80)]
        packed = score(decoder, Tokens.pack(documents)).logits
        alone = [score(decoder, Tokens.pack([ids])).logits for ids in documents]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CLASSES)
def test_long_positions(family: str):
    width = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = theirs(family, **width, rope_parameters=rope, max_position_embeddings=32768)
    assert_equal_logits(model, ours(model), 6, 11, offset=30000)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 wrote it."""
    rope = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return old


@pytest.mark.parametrize("scaling", ROPE)
def test_the_spelling_of_transformers_4_means_the_same(scaling: str):
    rope = {"rope_type": scaling.split(",")[0], "rope_theta": 500.0, **ROPE[scaling]}
    width = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = theirs("llama", **width, head_dim=8, rope_parameters=rope)
    old = old_spelling(model.config.to_dict())
    assert BackboneConfig.from_hf(old) == BackboneConfig.from_hf(model.config.to_dict())
    assert_equal_logits(model, ours(model, old), 21)


def test_presets_are_the_published_configs():
    shape = preset("Qwen/Qwen3-1.7B-Base")
    assert shape is PRESETS["qwen3-1.7b"]
    published = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": 0.02,
    }
    assert BackboneConfig.from_hf(published) == shape


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2"}, "use a Qwen3, Qwen2/2.5 or Llama/SmolLM checkpoint"),
        ({"use_sliding_window": True}, "Sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "Sliding-window"),
        ({"hidden_act": "gelu"}, "Only SwiGLU"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"rope_scaling": {"type": "mrope"}}, "RoPE scaling 'mrope' is not supported"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "cannot share 2 key-value heads evenly"),
        ({"head_dim": 7}, "must be even"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1"),
    ],
)
def test_backbones_that_are_not_supported_are_refused_in_one_sentence(change: dict[str, Any], sentence: str):
    config = {"model_type": "llama", **SHAPE, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    with pytest.raises(ConfigError, match=sentence):
        BackboneConfig.from_hf({**config, **change})


def test_a_config_that_lacks_its_shape_is_refused_by_name():
    with pytest.raises(ConfigError, match="hidden_size"):
        BackboneConfig.from_hf({"model_type": "llama", "vocab_size": 5, "num_attention_heads": 1})


def test_no_family_is_named_in_the_decoder():
    decoder = ours(theirs("qwen2", hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1))
    attention = decoder.layers[0].self_attn
    assert attention.q_proj.bias is not None
    assert attention.o_proj.bias is None
    assert isinstance(attention.q_norm, nn.Identity)
    assert isinstance(decoder.head_weight, Tensor)
