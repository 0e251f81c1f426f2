"""A tiny model that writes bytes, and a benchmark of a few problems that it cannot solve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from tah2.evals.run_plan import EvalConfig
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tests.engine.tiny import byte_tokenizer, spread

BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}


def save_model(folder: Path, seed: int = 5, **loop: Any) -> Path:
    """A random looped checkpoint with a byte tokenizer and a chat template."""
    torch.manual_seed(seed)
    model = LoopedForCausalLM(LoopedConfig(backbone=BACKBONE, loop=loop or {"kind": "tah2", "max_depth": 3})).eval()
    with torch.no_grad():
        spread(model.model)
    model.save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content[:24] }}|{% endfor %}a:"
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None
    return folder


def save_problems(folder: Path, count: int = 4) -> Path:
    """`gsm8k.jsonl` with `count` problems."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"gsm8k-{i}", "problem": f"{i} + {i}?", "answer": str(2 * i), "solution": ""} for i in range(count)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def asked(model: Path | None, data: Path, out: Path, **changes: Any) -> EvalConfig:
    """A run of a few short samples."""
    values: dict[str, Any] = {
        "out": out,
        "tasks": ("gsm8k",),
        "model": None if model is None else str(model),
        "n": 3,
        "data_dir": data,
        "max_tokens": 12,
        "engine": {"kernels": "off", "kv_slots": 4096, "max_num_seqs": 4, "device": "cpu"},
    }
    return EvalConfig(**(values | changes))
