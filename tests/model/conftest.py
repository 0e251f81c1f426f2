"""Checkpoints that the room's tests share: small enough to make anew, made once per run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ["<pad>", "<s>", "</s>", "<|im_end|>", "the", "a", "river", "runs", "to", "sea"]
WORDS += ["and", "town", "people", "answer", "is", "question", "what"]
TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


def save_tokenizer(folder: Path, **options: str) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", **options
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint with a tokenizer, a chat template and two end-of-sequence ids."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [2, 3]
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint with a head of its own, in bf16 and in several shards."""
    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="4KB")
    return folder
