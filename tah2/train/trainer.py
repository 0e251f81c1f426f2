"""The training run: steps, validation, checkpoints, and a clean end whatever happens.

One process or many (torchrun): every rank runs the same passes in the same order; rank 0 talks. A run that is
interrupted (SIGTERM, SIGINT, a kill) goes on from its last checkpoint when the same recipe is started again.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tah2.compute.train import TrainCounts, train_flops_recorded
from tah2.config.strict import plain
from tah2.data.batches import Rank, Step, evaluation_batches
from tah2.data.budget import resolve_steps
from tah2.data.packing import PackedBatch
from tah2.model.loop import LoopSettings
from tah2.train.callbacks import Callback, RunInfo, make_callbacks
from tah2.train.config import TrainConfig
from tah2.train.depth_stats import DepthStats
from tah2.train.export import export_hf
from tah2.train.health import HealthConfig, HealthMonitor, check_finite
from tah2.train.metrics import StepMetrics
from tah2.train.observe import count, observe
from tah2.train.optimizer import build_optimizer, schedule, set_rate
from tah2.train.parallel import RankPeers, World, accumulate, clip_gradients, compile_blocks, gathered, shard
from tah2.train.prepare import Prepared, prepare
from tah2.train.resume import CheckpointStore, TrainingState
from tah2.train.schemes import Context, Outcome, scheme_for
from tah2.train.summary import write_summary
from tah2.train.validate import validate

CHECKPOINTS, MODEL = "checkpoints", "model"


@dataclass
class Window:
    """What happened since the last logged step."""

    stats: DepthStats
    counts: TrainCounts
    started: float
    gradient_norm: float = 0.0


class Trainer:
    """One run of one recipe; `run` returns the summary that is also written to `summary.json`."""

    def __init__(self, config: TrainConfig, world: World, callbacks: Iterable[Callback] = ()) -> None:
        self.config, self.world = config, world
        self.callbacks = make_callbacks(config.logging.loggers, rank=world.rank, extra=callbacks)
        if config.system.threads is not None:
            torch.set_num_threads(config.system.threads)
        self.prepared: Prepared = prepare(config)
        self.model_config = self.prepared.model.config
        self.decoder = self.prepared.model.model
        self.scheme = scheme_for(self.decoder, config.objective)
        if self.scheme.freezes_backbone:
            self.decoder.requires_grad_(False)
            assert self.decoder.gate is not None
            self.decoder.gate.requires_grad_(True)
        self.backbone_parameters = sum(p.numel() for p in self.decoder.parameters())
        self.ceiling = self.decoder.ceiling()
        if config.system.compile:
            compile_blocks(self.decoder)
        shard(self.decoder, world, self._compute_dtype())
        self.optimizer = build_optimizer(self.decoder, config.optimizer)
        self.steps = resolve_steps(
            config.budget, self.prepared.data.size, config.batch.samples, self.backbone_parameters
        )
        self.place = Rank(world.rank, world.world_size)
        self.validation = self._validation_batches()
        self.state = TrainingState(self.decoder, self.optimizer, config=_fingerprint(config))
        self.health = HealthMonitor(HealthConfig(warmup_steps=self._unjudged_steps()))
        self.interrupted = False

    def run(self) -> dict[str, Any]:
        with CheckpointStore(self.config.out / CHECKPOINTS, self.config.checkpoint.keep, self.world) as store:
            latest = store.latest()
            if latest is not None:
                store.load(latest, self.state)
            summary: dict[str, Any] = {"status": "failed"}
            self.callbacks.on_start(self._run_info())
            try:
                self.callbacks.on_message("info", self.prepared.data.report.describe())
                with _signals(self):
                    self._train(store)
                summary = self._finish(store)
            finally:
                self.callbacks.on_end(summary)
        return summary

    def _train(self, store: CheckpointStore) -> None:
        window = self.new_window()
        started, state = time.monotonic(), self.state
        for step in self.prepared.data.steps(self.config.batch, self.place, state.loader):
            if state.step >= self.steps or self._asked_to_stop():
                break
            self.step(step, window)
            state.step, state.loader = state.step + 1, step.state
            if state.step % self.config.logging.every == 0 or state.step == self.steps:
                self._log(window)
                window = self.new_window()
            if self.config.validation.every and state.step % self.config.validation.every == 0:
                self._validate()
            if self.config.checkpoint.every and state.step % self.config.checkpoint.every == 0:
                self._save(store)
        state.counters["seconds"] = state.counters.get("seconds", 0.0) + time.monotonic() - started

    def step(self, step: Step, window: Window) -> None:
        """One optimizer step; what it measured is added to `window`."""
        number = self.state.step
        set_rate(self.optimizer, schedule(self.config.optimizer, number, self.steps))
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, batch in enumerate(step.micro_batches):
            accumulate(self.decoder, last=index == len(step.micro_batches) - 1)
            batch = batch.to(self.world.device)
            with gathered(self.decoder):
                outcome = self.scheme(self.decoder, batch, self._context(step, batch, number, index))
                outcome.total.backward()
            total += outcome.total.detach().double()
            self._observe(window, outcome, batch, step.supervised_tokens)
        check_finite(number + 1, float(self.world.sum_tensor(total)), checkpoint=self._last_checkpoint())
        norm = float(clip_gradients(self.decoder.parameters(), self.config.optimizer.max_gradient_norm, self.world))
        check_finite(number + 1, norm, checkpoint=self._last_checkpoint(), what="gradient norm")
        window.gradient_norm = norm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _context(self, step: Step, batch: PackedBatch, number: int, index: int) -> Context:
        objective = self.config.objective
        place = (number * 4096 + index) * self.world.world_size + self.world.rank
        return Context(
            objective,
            max(1, step.supervised_tokens),
            self._loop_settings(),
            group=self.world.group,
            seed=self.config.seed * 1_000_003 + place,
            continue_all=number < objective.continue_all_ratio * self.steps,
            token_weight=_tag_weights(objective.tag_weights, batch),
        )

    def _loop_settings(self) -> LoopSettings:
        system, on_gpu = self.config.system, self.world.device.type == "cuda"
        recompute = on_gpu if system.activation_checkpointing is None else system.activation_checkpointing
        return LoopSettings(attention=system.attention, checkpoint=recompute, peers=RankPeers(self.world))

    def _observe(self, window: Window, outcome: Outcome, batch: PackedBatch, supervised_tokens: int) -> None:
        if batch.is_placeholder:
            return
        window.stats += observe(outcome, batch, self.ceiling, max(1, supervised_tokens))
        window.counts += count(outcome, batch, self.decoder, self.ceiling)

    def _log(self, window: Window) -> None:
        seconds = time.monotonic() - window.started
        stats = window.stats.pooled(self.world.group)
        counts = window.counts.pooled(self.world.sum_tensor)
        flops = train_flops_recorded(self.decoder.backbone, self.decoder.loop, counts)
        counters = self.state.counters
        for name, value in (
            ("tokens", float(counts.tokens[0])),
            ("flops", float(flops.total_actual)),
            ("flops_paper", float(flops.total_paper)),
        ):
            counters[name] = counters.get(name, 0.0) + value
        metrics = StepMetrics(
            stats,
            1.0 if self.scheme.freezes_backbone else self.config.objective.decider_coefficient,
            flops=flops,
            seconds=seconds,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            gradient_norm=window.gradient_norm,
            peak_bytes=peak_bytes(self.world.device),
        ).flat()
        self.state.metrics["step"] = metrics
        self.callbacks.on_step(self.state.step, metrics)
        for problem in self.health.check(self.state.step, metrics):
            self.callbacks.on_message("warning", problem)

    def _validate(self) -> dict[str, float]:
        if not self.validation:
            return {}
        with gathered(self.decoder):
            metrics = validate(
                self.decoder, self.validation, self._loop_settings(), self.world.device, self.world.sum_tensor
            )
        self.state.metrics["validation"] = {"step": self.state.step, **metrics}
        self.callbacks.on_validation(self.state.step, metrics)
        return metrics

    def _save(self, store: CheckpointStore) -> None:
        path = store.save(self.state, self.config.checkpoint.asynchronous)
        self.callbacks.on_checkpoint(self.state.step, path)

    def _finish(self, store: CheckpointStore) -> dict[str, Any]:
        """Checkpoint and, where the budget is spent, final validation, the exported model and the summary."""
        done = self.state.step >= self.steps
        if done and self.state.metrics.get("validation", {}).get("step") != self.state.step:
            self._validate()
        self._save(store)
        store.wait()
        summary: dict[str, Any] = {
            "status": "finished" if done else "interrupted",
            "step": self.state.step,
            "steps": self.steps,
            **self.state.counters,
            "validation": self.state.metrics.get("validation", {}),
            "training": self.state.metrics.get("step", {}),
        }
        if done:
            export_hf(
                self.decoder,
                self.model_config,
                self.prepared.tokenizer_folder,
                self.prepared.model.generation_config.to_diff_dict(),
                self.config.out / MODEL,
                self.world,
                self.prepared.export_dtype,
            )
            summary["model"] = str(self.config.out / MODEL)
        if self.world.is_main:
            write_summary(self.config.out / "summary.json", {**summary, "config": plain(self.config)})
        return summary

    def new_window(self) -> Window:
        device = self.world.device
        return Window(DepthStats.zero(self.ceiling, device), TrainCounts.zero(self.ceiling), time.monotonic())

    def _validation_batches(self) -> tuple[PackedBatch, ...]:
        held_out, limit = self.prepared.data.validation, self.config.validation.samples
        if limit is not None and limit < len(held_out):
            held_out = held_out.select(range(limit))
        return evaluation_batches(held_out, self.config.batch.tokens_per_micro_batch, self.place)

    def _compute_dtype(self) -> torch.dtype | None:
        wanted = self.config.system.precision
        on_gpu = self.world.device.type == "cuda"
        return torch.bfloat16 if wanted == "bf16" or (wanted == "auto" and on_gpu) else None

    def _unjudged_steps(self) -> int:
        return int(max(self.config.optimizer.warmup_ratio, self.config.objective.continue_all_ratio) * self.steps)

    def _asked_to_stop(self) -> bool:
        flag = torch.tensor(float(self.interrupted), device=self.world.device)
        return bool(self.world.sum_tensor(flag) > 0)

    def _last_checkpoint(self) -> Path | None:
        whole = sorted((self.config.out / CHECKPOINTS).glob("step-*/complete.json"))
        return whole[-1].parent if whole else None

    def _run_info(self) -> RunInfo:
        logging = self.config.logging
        return RunInfo(
            folder=self.config.out,
            name=logging.name or self.config.out.name,
            start_step=self.state.step,
            total_steps=self.steps,
            config=plain(self.config),
            project=logging.project,
        )


@contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and SIGINT end the run after the current step, with a checkpoint; a second one ends it at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if trainer.interrupted:
            raise KeyboardInterrupt
        trainer.interrupted = True
        trainer.callbacks.on_message("info", "Stopping after this step; start the same recipe again to go on.")

    try:
        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever runs us there handles signals
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _tag_weights(weights: dict[str, float], batch: PackedBatch) -> Tensor | None:
    """fp32 `[N]`: the loss weight of each token by its kind, where kinds weigh differently."""
    if not weights or batch.tags is None:
        return None
    table = torch.ones(256, device=batch.ids.device)
    for tag, weight in weights.items():
        table[int(tag)] = weight
    return table[batch.tags]


def _fingerprint(config: TrainConfig) -> dict[str, Any]:
    """What must be the same for a run to go on; how it is logged, checked and spread over machines may change."""
    free = {"out", "logging", "validation", "checkpoint", "system"}
    return {name: value for name, value in plain(config).items() if name not in free}


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on its GPU, or resident where it runs on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(config: TrainConfig, callbacks: Iterable[Callback] = ()) -> dict[str, Any]:
    """Run a recipe in this process (one rank of torchrun's, or alone)."""
    with World.from_environment() as world:
        return Trainer(config, world, callbacks).run()
