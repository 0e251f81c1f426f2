"""The training run: steps, validation, checkpoints, and a clean end whatever happens.

One process or many (torchrun): every rank runs the same passes in the same order; rank 0 talks. A run that is
interrupted (SIGTERM, SIGINT, a kill) goes on from its last checkpoint when the same recipe is started again.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tah2.config.strict import ConfigError, plain
from tah2.data.batches import Rank, Step, evaluation_batches
from tah2.data.budget import resolve_steps
from tah2.data.order import mixed_hash
from tah2.data.packing import PackedBatch
from tah2.model.folder import MARKER as MODEL_MARKER
from tah2.model.loop import LoopedDecoder, LoopSettings
from tah2.model.store import LoopStore
from tah2.train.callbacks import Callback, RunInfo, make_callbacks
from tah2.train.callbacks.base import Callbacks, Level
from tah2.train.config import TAGS, TrainConfig
from tah2.train.export import export_hf
from tah2.train.health import HealthConfig, HealthMonitor, NonFiniteLoss
from tah2.train.lora import add_adapters, is_adapter
from tah2.train.metrics import StepMetrics
from tah2.train.observe import count, flops_of, observe
from tah2.train.optimizer import build_optimizer, schedule, set_rate
from tah2.train.parallel import RankPeers, World, accumulate, clip_gradients, compile_blocks, gathered, shard
from tah2.train.prepare import describe_data, open_data, open_model, start_reentry
from tah2.train.resume import MARKER, CheckpointStore, TrainingState, refuse_other_config
from tah2.train.schemes import Context, Outcome, scheme_for
from tah2.train.stopping import StopRequest
from tah2.train.summary import write_summary
from tah2.train.validate import validate
from tah2.train.window import Window

CHECKPOINTS, MODEL, SUMMARY = "checkpoints", "model", "summary.json"
JUDGED_STEPS = 100
"""A problem that lasts for about so many steps is told (see `health`)."""


class Trainer:
    """One run of one recipe; `run` returns the summary that is also written to `summary.json`."""

    def __init__(self, config: TrainConfig, world: World, callbacks: Iterable[Callback] = ()) -> None:
        self.config, self.world = config, world
        check_folder(config.out)
        self.callbacks = make_callbacks(config.logging.loggers, rank=world.rank, extra=callbacks)
        if config.system.threads is not None:
            torch.set_num_threads(config.system.threads)
        self.store = CheckpointStore(config.out / CHECKPOINTS, config.checkpoint.keep, world)
        self.latest = self.store.latest()
        if self.latest is not None:
            self.store.check(self.latest, fingerprint(config))
        self.opened = open_model(config)
        self.model_config = self.opened.model.config
        self.decoder = self.opened.model.model.train()
        self.scheme = scheme_for(self.decoder, config.objective)
        self.ceiling = self.decoder.ceiling()
        self.data = open_data(config, self.opened, world)
        parameters = backbone_parameters(self.decoder)
        self.steps = resolve_steps(config.budget, self.data.size, config.batch.samples, parameters)
        self.place = Rank(world.rank, world.world_size)
        self.validation = self._validation_batches()
        self.optimizer = self._place_model()
        self.state = TrainingState(self.decoder, self.optimizer, config=fingerprint(config))
        patience = max(3, min(HealthConfig.patience, math.ceil(JUDGED_STEPS / config.logging.every)))
        self.health = HealthMonitor(HealthConfig(patience, warmup_steps=self._unjudged_steps()))
        self.stop = StopRequest(aloud=world.is_main)
        self._saving: tuple[int, Path] | None = None
        """A checkpoint that is being written in the background"""
        self._started = time.monotonic()
        self._seconds_before = 0.0

    def _place_model(self) -> torch.optim.Optimizer:
        """Start state, adapters, what is frozen, compilation, sharding; then the optimizer of what is left to learn."""
        config = self.config
        if self.latest is None:
            start_reentry(config, self.opened, self.data, self.world)
        if config.adapter is not None:
            add_adapters(self.decoder, config.adapter)
        if self.scheme.freezes_backbone:
            if config.adapter is not None:
                raise ConfigError("This scheme trains the gate alone: an adapter would learn nothing; leave it out.")
            assert self.decoder.gate is not None
            self.decoder.requires_grad_(False)
            self.decoder.gate.requires_grad_(True)
        if config.system.compile:
            compile_blocks(self.decoder)
        shard(self.decoder, self.world, self.compute_dtype)
        return build_optimizer(self.decoder, config.optimizer)

    def run(self) -> dict[str, Any]:
        with self.store:
            if self.latest is not None:
                self.store.load(self.latest, self.state)
            self._seconds_before = self.state.counters.get("seconds", 0.0)
            summary: dict[str, Any] = {"status": "failed"}
            self.callbacks.on_start(self._run_info())
            try:
                self._introduce()
                with self.stop.listening():
                    self._train()
                    summary = self._finish()
            finally:
                self.callbacks.on_end(summary)
                self.opened.close()
        return summary

    def _introduce(self) -> None:
        self._say("info", describe_data(self.config, self.data))
        if self.world.device.type == "cpu" and self.compute_dtype is torch.bfloat16:
            self._say(
                "warning",
                "Most CPUs multiply in bf16 hundreds of times slower than in fp32: use system.precision=fp32.",
            )

    def _say(self, level: Level, text: str) -> None:
        if self.world.is_main:
            self.callbacks.on_message(level, text)

    def _train(self) -> None:
        config, state, window = self.config, self.state, self._resumed_window()
        mark = time.monotonic()
        for step in self.data.steps(config.batch, self.place, state.loader):
            if state.step >= self.steps or self._asked_to_stop():
                break
            self.step(step, window)
            state.step, state.loader = state.step + 1, step.state
            window.seconds += time.monotonic() - mark
            if state.step % config.logging.every == 0 or state.step == self.steps:
                self._log(window)
                window = self.new_window()
            if config.validation.every and state.step % config.validation.every == 0:
                self._validate()
            if config.checkpoint.every and state.step % config.checkpoint.every == 0 and state.step < self.steps:
                self._save(window)
            self._announce()
            mark = time.monotonic()
        if state.step < self.steps:
            self._save(window)

    def step(self, step: Step, window: Window) -> None:
        """One optimizer step on this rank's share of a global batch; its sums go into `window`."""
        number, here = self.state.step, self.new_window()
        set_rate(self.optimizer, schedule(self.config.optimizer, number, self.steps))
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, batch in enumerate(step.micro_batches):
            if self.compute_dtype is None:  # unreduced fp32 sums would meet bf16 gradients, which FSDP2 cannot join
                accumulate(self.decoder, last=index == len(step.micro_batches) - 1)
            batch = batch.to(self.world.device)
            with gathered(self.decoder, self.compute_dtype):
                outcome = self.scheme(self.decoder, batch, self._context(step, batch, number))
                outcome.run.store = LoopStore()  # no pass reads its keys and values any more
                outcome.total.backward()
            total += outcome.total.detach().double()
            self._observe(here, outcome, batch, step.supervised_tokens)
            del outcome  # not to be held beside the next one
        loss = float(self.world.sum_tensor(total))
        if not math.isfinite(loss):
            self._refuse("loss", loss, here)
        norm = float(clip_gradients(self.decoder.parameters(), self.config.optimizer.max_gradient_norm, self.world))
        if not math.isfinite(norm):
            self._refuse("gradient norm", norm, here)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        window.stats, window.counts, window.gradient_norm = window.stats + here.stats, window.counts + here.counts, norm

    def _refuse(self, what: str, value: float, here: Window) -> NoReturn:
        """End the run before the update; all ranks are here, as `value` is the same on all."""
        metrics = StepMetrics(here.stats.pooled(self.world.group)).flat()
        depths = [metrics.get(f"depth/{m}/loss", math.nan) for m in range(1, self.ceiling + 1)]
        self.store.wait()
        raise NonFiniteLoss(self.state.step + 1, depths, self.store.latest(), what=what, value=value)

    def _context(self, step: Step, batch: PackedBatch, number: int) -> Context:
        objective = self.config.objective
        return Context(
            objective,
            max(1, step.supervised_tokens),
            self._loop_settings(),
            group=self.world.group,
            seed=int(mixed_hash(self.config.seed, number)[0]),
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
        looks_ahead = self.scheme.looks_ahead
        window.stats += observe(outcome, batch, self.ceiling, max(1, supervised_tokens), looks_ahead)
        window.counts += count(outcome, batch, self.decoder, self.ceiling, looks_ahead)

    def _log(self, window: Window) -> None:
        window = window.pooled(self.world)
        flops = flops_of(window.counts, self.decoder, self.scheme.freezes_backbone)
        counters = self.state.counters
        for name, value in (
            ("tokens", float(window.counts.tokens[0])),
            ("flops", float(flops.total_actual)),
            ("flops_paper", float(flops.total_paper)),
        ):
            counters[name] = counters.get(name, 0.0) + value
        metrics = StepMetrics(
            window.stats,
            self.config.objective.decider_coefficient,
            flops=flops,
            seconds=window.seconds,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            gradient_norm=window.gradient_norm,
            peak_bytes=peak_bytes(self.world.device),
        ).flat()
        if self.scheme.freezes_backbone:  # only the gate's loss is minimised
            metrics["loss"] = metrics["loss/decider"]
        self.state.metrics["step"] = metrics
        self.callbacks.on_step(self.state.step, metrics)
        for problem in self.health.check(self.state.step, metrics):
            self._say("warning", problem)

    def _validate(self) -> dict[str, float]:
        if not self.validation:
            return {}
        with gathered(self.decoder, self.compute_dtype):
            metrics = validate(
                self.decoder, self.validation, self._loop_settings(), self.world.device, self.world.sum_tensor
            )
        self.state.metrics["validation"] = {"step": self.state.step, **metrics}
        self.callbacks.on_validation(self.state.step, metrics)
        return metrics

    def _save(self, window: Window) -> None:
        """Write a checkpoint, with what `window` holds since the last logged step."""
        self.store.wait()
        self._announce()
        self.state.metrics["window"] = window.pooled(self.world).to_json()
        self.state.counters["seconds"] = self._seconds()
        path = self.store.save(self.state, self.config.checkpoint.asynchronous)
        self._saving = (self.state.step, path)
        self._announce()

    def _announce(self) -> None:
        """Tell that a checkpoint is complete, once it is."""
        if self._saving is not None and (self._saving[1] / MARKER).is_file():
            self.callbacks.on_checkpoint(*self._saving)
            self._saving = None

    def _finish(self) -> dict[str, Any]:
        """Checkpoint and, where the budget is spent, final validation, the exported model and the summary."""
        done = self.state.step >= self.steps
        if done:
            if self.state.metrics.get("validation", {}).get("step") != self.state.step:
                self._validate()
            self._save(self.new_window())
        self.store.wait()
        self._announce()
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
                self.opened.tokenizer_folder,
                self.opened.model.generation_config.to_diff_dict(),
                self.config.out / MODEL,
                self.world,
                self.opened.export_dtype,
            )
            summary["model"] = str(self.config.out / MODEL)
        if self.world.is_main:
            write_summary(self.config.out / SUMMARY, {**summary, "config": plain(self.config)})
        return summary

    def new_window(self) -> Window:
        return Window.new(self.ceiling, self.world.device)

    def _resumed_window(self) -> Window:
        """What the checkpoint had seen since its last logged step; rank 0 carries it for all."""
        saved = self.state.metrics.pop("window", None)
        if saved is None or not self.world.is_main:
            return self.new_window()
        return Window.from_json(saved, self.ceiling, self.world.device)

    def _seconds(self) -> float:
        """Time that the run has taken, earlier attempts included up to their last checkpoint."""
        return self._seconds_before + time.monotonic() - self._started

    def _validation_batches(self) -> tuple[PackedBatch, ...]:
        held_out, limit = self.data.validation, self.config.validation.samples
        if limit is not None and limit < len(held_out):
            held_out = held_out.select(range(limit))
        return evaluation_batches(held_out, self.config.batch.tokens_per_micro_batch, self.place)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What products run in; None: fp32, as the weights are."""
        wanted = self.config.system.precision
        on_gpu = self.world.device.type == "cuda"
        return torch.bfloat16 if wanted == "bf16" or (wanted == "auto" and on_gpu) else None

    def _unjudged_steps(self) -> int:
        return int(max(self.config.optimizer.warmup_ratio, self.config.objective.continue_all_ratio) * self.steps)

    def _asked_to_stop(self) -> bool:
        flag = torch.tensor(float(bool(self.stop)), device=self.world.device)
        return bool(self.world.sum_tensor(flag) > 0)

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


def _tag_weights(weights: dict[str, float], batch: PackedBatch) -> Tensor | None:
    """fp32 `[N]`: the loss weight of each token by its kind, where kinds weigh differently."""
    if not weights or batch.tags is None:
        return None
    table = torch.ones(TAGS, device=batch.ids.device)
    for tag, weight in weights.items():
        table[int(tag)] = weight
    return table[batch.tags]


def backbone_parameters(decoder: LoopedDecoder) -> int:
    """Parameters of the backbone that is post-trained, without what the loop or adapters add."""
    added = ("reentry.", "gate.")
    named = decoder.named_parameters()
    return sum(p.numel() for name, p in named if not name.startswith(added) and not is_adapter(name))


def fingerprint(config: TrainConfig) -> dict[str, Any]:
    """What must be the same for a run to go on; how it is logged, checked and spread over machines may change."""
    return _without_free(plain(config))


def _without_free(config: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in _FREE}
    for section, key in (("batch", "tokens_per_micro_batch"), ("data", "cache_dir")):
        if kept[section] is not None:
            kept[section] = {name: value for name, value in kept[section].items() if name != key}
    return kept


_FREE = ("out", "logging", "validation", "checkpoint", "system")


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on its GPU, or resident where it runs on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_folder(out: Path) -> None:
    """Refuse, before anything is loaded, a place where the run could not leave its results."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    reason = f"{there} is a file" if not there.is_dir() else f"{there} cannot be written to"
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"Cannot use {out} for the results of this run ({reason}): name another folder as 'out'.")


def finished_before(config: TrainConfig) -> dict[str, Any] | None:
    """The summary of this recipe's finished run in `out`, if there is one; another recipe's is refused."""
    path = config.out / SUMMARY
    if not path.is_file() or not (config.out / MODEL / MODEL_MARKER).is_file():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        return None
    refuse_other_config(config.out, _without_free(summary["config"]), fingerprint(config))
    return summary


def train(config: TrainConfig, callbacks: Iterable[Callback] = ()) -> dict[str, Any]:
    """Run a recipe in this process (one rank of torchrun's, or alone)."""
    with World.from_environment() as world:
        summary = finished_before(config)
        world.barrier()  # nobody starts a run that another rank finds finished
        if summary is None:
            return Trainer(config, world, callbacks).run()
        if world.is_main:
            Callbacks().on_message(
                "info",
                f"This run is finished: its model is in {config.out / MODEL}. Name another 'out' to train anew.",
            )
        return summary
