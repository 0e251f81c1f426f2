"""A tiny tokenizer and small chat templates in the style of well-known families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|endoftext|>{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
QWEN = """
{%- if tools %}<|im_start|>system
tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set parts = m.content.split('</think>') %}
{%- set answer = parts[-1].lstrip('\\n') %}
{%- set thought = m.reasoning_content or (parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- answer }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
UNSTABLE = "{% for m in messages %}{{ messages | length }}{{ m.role }}:{{ m.content }}\n{% endfor %}"

LINES = [
    "What is two plus two? It is four, as we all know.",
    "<think> Let us see: one plus one makes two. </think> The answer is two.",
    "user assistant system tool role content def f(x): return x + 1  # add one",
    "Ein paar Wörter mit Umlauten, 一些中文, and an emoji 🙂.",
] * 4


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 ids; control tokens as in ChatML, think tags as ordinary added tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def chat(*turns: str, roles: tuple[str, str] = ("user", "assistant")) -> list[dict[str, Any]]:
    """Messages that alternate between the two roles."""
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    return path
