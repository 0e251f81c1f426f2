"""Held-out loss of what inference would say: the mixture (or the last depth) along the model's own routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tah2.data.packing import IGNORE, PackedBatch
from tah2.model.loop import LoopedDecoder, LoopRun, LoopSettings
from tah2.model.store import LoopStore
from tah2.model.weights import LOG_WEIGHTS
from tah2.objective.head import read_head
from tah2.objective.mixture import mixture_logprob
from tah2.train.config import TAGS
from tah2.train.readers import TargetReader
from tah2.train.schemes import tokens_of


@torch.no_grad()
def validate(
    decoder: LoopedDecoder,
    batches: Sequence[PackedBatch],
    settings: LoopSettings,
    device: torch.device,
    pool: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """`loss` (nats per supervised token), `depth/m/loss` and `depth/m/share` of the supervised tokens that executed
    depth m, `depth/mean` and, for data that tells kinds of tokens apart, `tag/k/loss`.

    `pool` sums a tensor over ranks. Losses along the routes of the exit threshold, as at inference.
    """
    was_training = decoder.training
    decoder.eval()
    try:
        return _named(*_sums(decoder, batches, settings, device, pool), decoder.ceiling(settings.max_depth))
    finally:
        decoder.train(was_training)


def _sums(
    decoder: LoopedDecoder,
    batches: Sequence[PackedBatch],
    settings: LoopSettings,
    device: torch.device,
    pool: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """fp64 sums over all ranks: losses and counts in all and by depth, then losses and counts by tag."""
    ceiling = decoder.ceiling(settings.max_depth)
    sums = torch.zeros(4 + 2 * ceiling, dtype=torch.float64)
    tags = torch.zeros(2, TAGS, dtype=torch.float64)
    for batch in batches:
        if batch.is_placeholder:
            _measure(decoder, batch.to(device), settings)  # other ranks need its passes
            continue
        batch = batch.to(device)
        run, logprob = _measure(decoder, batch, settings)
        supervised = batch.targets != IGNORE
        loss = -logprob.where(supervised, 0.0).double()
        counts = (int(supervised.sum()), int(run.executed.sum()), len(batch))
        sums[:4] += torch.tensor([float(loss.sum()), *counts], dtype=torch.float64)
        for current in run.passes:
            if current.reading is not None:
                rows = supervised[current.index]
                sums[4 + 2 * (current.depth - 1)] += -float(current.reading.measured.target_logprob[rows].sum())
                sums[5 + 2 * (current.depth - 1)] += int(rows.sum())
        if batch.tags is not None:
            tag = batch.tags[supervised].cpu()
            tags[0].index_add_(0, tag, loss[supervised].cpu())
            tags[1].index_add_(0, tag, torch.ones(len(tag), dtype=torch.float64))
    return pool(sums), pool(tags)


def _named(sums: Tensor, tags: Tensor, ceiling: int) -> dict[str, float]:
    loss, supervised, depths, tokens = sums[:4].tolist()
    metrics = {"loss": loss / max(1, supervised), "depth/mean": depths / max(1, tokens)}
    for depth in range(1, ceiling + 1):
        total, count = sums[4 + 2 * (depth - 1) : 6 + 2 * (depth - 1)].tolist()
        if count:
            metrics[f"depth/{depth}/loss"] = total / count
            metrics[f"depth/{depth}/share"] = count / max(1, supervised)
    for tag in tags[1].nonzero().squeeze(-1).tolist():
        metrics[f"tag/{tag}/loss"] = float(tags[0, tag] / tags[1, tag])
    return metrics


def _measure(decoder: LoopedDecoder, batch: PackedBatch, settings: LoopSettings) -> tuple[LoopRun, Tensor]:
    """The run, and log q_t[y*_t] of inference's own output for every token with a target."""
    if decoder.kind.prefill_runs_all:
        settings = replace(settings, run_all=batch.targets == IGNORE)
    reader = TargetReader(decoder.head_weight, batch.targets, not decoder.kind.loops_middle)
    run = decoder(tokens_of(batch), reader, settings)
    run.store = LoopStore()  # its keys and values are not to be held beside those of the next batch
    if run.passes[0].reading is None:
        return run, read_head(run.final_state, decoder.head_weight, batch.targets).target_logprob
    executed = [current.index for current in run.passes]
    logits = [current.continue_logit for current in run.passes[:-1] if current.continue_logit is not None]
    weights = LOG_WEIGHTS[decoder.kind.output](logits, executed)
    logprobs = [current.reading.measured.target_logprob for current in run.passes]
    return run, mixture_logprob(weights, logprobs, executed)
