"""Parameter counts against real modules, built without memory on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tah2.compute import parameter_counts
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.kinds import LOOP_KINDS, kind_of
from tah2.model.loop import LoopedDecoder

FAMILIES = {
    "q/k norm, tied": BackboneConfig("qwen3", 50, 16, 24, 3, 3, 1, 8, tie_word_embeddings=True, qk_norm=True),
    "q/k/v biases": BackboneConfig("qwen2", 50, 16, 24, 3, 4, 2, 4, qkv_bias=True),
    "all biases": BackboneConfig("llama", 50, 16, 24, 4, 4, 2, 4, qkv_bias=True, output_bias=True, mlp_bias=True),
}


def size(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kind", sorted(LOOP_KINDS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_counts_are_those_of_the_model_itself(kind: str, family: str):
    backbone = FAMILIES[family]
    loop = LoopConfig(kind, updater_width=5, decider_width=7, decider_top_k=3)
    with torch.device("meta"):
        model = LoopedDecoder(backbone, loop)
    counts = parameter_counts(backbone, loop)
    assert counts.added_total == size(model.reentry) + size(model.gate)
    assert counts.total == size(model)
    assert counts.fraction == counts.added_total / counts.total


@pytest.mark.parametrize("options", [{}, {"kind": "huginn"}, {"kind": "ouro-adaptive"}, {"reentry": "top-k-embedding"}])
def test_each_added_part_is_named_and_counted(options: dict[str, str]):
    backbone, loop = FAMILIES["q/k norm, tied"], LoopConfig(**options)  # type: ignore[arg-type]
    kind, counts = kind_of(loop), parameter_counts(FAMILIES["q/k norm, tied"], loop)
    with torch.device("meta"):
        sizes = [size(part(backbone, loop)) for part in (kind.reentry, kind.gate) if part is not None]
    assert list(counts.added.values()) == [count for count in sizes if count]
    assert set(counts.added) <= {"updater", "decider", "exit-gate", "input-adapter"}


def test_a_loop_without_parts_adds_nothing():
    counts = parameter_counts(FAMILIES["all biases"], LoopConfig("ouro"))
    assert (counts.added, counts.added_total, counts.fraction) == ({}, 0, 0.0)


@pytest.mark.slow
def test_backbones_have_the_size_that_transformers_gives_them():
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for config, model in (
        (Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True), Qwen3ForCausalLM),
        (Qwen2Config(**shape, tie_word_embeddings=False), Qwen2ForCausalLM),
        (LlamaConfig(**shape, attention_bias=True, mlp_bias=True), LlamaForCausalLM),
    ):
        backbone = BackboneConfig.from_hf(config.to_dict())
        with torch.device("meta"):
            assert parameter_counts(backbone, LoopConfig("standard")).total == size(model(config))
