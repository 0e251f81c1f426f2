"""Prompts, configurations and a chat tokenizer for distillations that take milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tah2.config.strict import build, merge
from tah2.distill.config import DistillConfig
from tests.data.conftest import write_lines

FAST = {"model": "fake-teacher", "first_wait": 0.01, "longest_wait": 0.02, "retries": 1, "in_flight": 4}


def question(text: str, answer: str = "old", **extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"id": text.replace(" ", "-"), "messages": messages, **extra}


def config(tmp_path: Path, rows: list[Any], url: str = "http://localhost/v1", **changes: Any) -> DistillConfig:
    """Prompts in a file, asked of the server at `url`."""
    prompts = write_lines(tmp_path / "prompts.jsonl", rows)
    recipe = {
        "sources": [{"path": str(prompts)}],
        "teacher": {"endpoint": {"url": url, **FAST}},
        "out": str(tmp_path / "out"),
        "sampling": {"max_tokens": 64},
    }
    return build(DistillConfig, merge(recipe, changes))


def rows_of(out: Path, name: str = "train.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text(encoding="utf-8").split("\n") if line]
