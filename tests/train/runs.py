"""Tiny recipes that train in seconds, and what runs leave behind."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from tah2.config.strict import build, merge
from tah2.model.loop import LoopedDecoder
from tah2.train.callbacks.jsonl import read_records
from tah2.train.config import TrainConfig
from tah2.train.parallel import World
from tah2.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 284,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 3,
}
RECIPE: dict[str, Any] = {
    "model": {"shape": SHAPE, "start": {"steps": 20}},
    "loop": {"kind": "tah2", "max_depth": 2, "updater_width": 8, "decider_width": 8, "decider_top_k": 4},
    "procedural": {"task": "stop-chase", "samples": 100, "validation_samples": 10},
    "batch": {"samples": 4, "tokens_per_micro_batch": 96},
    "budget": {"steps": 9},
    "optimizer": {"learning_rate": 1e-2, "gate_learning_rate": 2e-2},
    "validation": {"every": 5},
    "checkpoint": {"every": 2},
    "logging": {"every": 1, "loggers": []},
    "system": {"precision": "fp32", "threads": 1},
}
PLAIN: dict[str, Any] = {"loop": {"kind": "standard"}, "optimizer": {"gate_learning_rate": None}}
"""Over `RECIPE`: without a gate."""


def recipe(out: Path, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """`RECIPE` with `changes` merged over it; a model path replaces the shape."""
    merged = merge(RECIPE, {"out": str(out)})
    for change in changes:
        merged = merge(merged, change)
    if merged["model"].get("path"):
        merged["model"].pop("shape")
    return merged


def config(out: Path, *changes: Mapping[str, Any]) -> TrainConfig:
    return build(TrainConfig, recipe(out, *changes))


def run_one_step(config: TrainConfig) -> dict[str, Any]:
    """The summary of a run that is asked to stop in its first step."""
    with World.from_environment() as world:
        trainer = Trainer(config, world)
        step = trainer.step

        def then_stop(*arguments: Any) -> None:
            step(*arguments)
            trainer.stop.asked = 0.0

        trainer.step = then_stop  # type: ignore[method-assign]
        return trainer.run()


def environment() -> dict[str, str]:
    """Of a process of its own that trains on the CPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def run_on_two(recipe: Mapping[str, Any], folder: Path) -> str:
    """Run the recipe to its end on two processes of torchrun; returns what they said."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(dict(recipe)))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tah2", "sft", str(path)]
    done = subprocess.run([sys.executable, *launch], env=environment(), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(out / "metrics.jsonl") if record["kind"] == kind]


def curve(out: Path) -> list[dict[str, Any]]:
    """Step and validation records without what depends on the clock or the process."""
    varying = ("speed/", "memory/", "time")
    return [
        {name: value for name, value in record.items() if not name.startswith(varying)}
        for record in read_records(out / "metrics.jsonl")
        if record["kind"] in ("step", "validation")
    ]


def same_curves(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], rel: float) -> None:
    """Equal records, numbers up to `rel`."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert (one["kind"], one["step"]) == (other["kind"], other["step"])
        for name in one.keys() - {"kind"}:
            assert math.isclose(one[name], other[name], rel_tol=rel, abs_tol=rel), (one["step"], name)


def weights(decoder: LoopedDecoder) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in decoder.state_dict().items()}
