"""From per-depth predictions to one distribution: q_t = sum_m omega_t^(m) q_t^(m)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tah2.model.kinds import Output
from tah2.model.loop import LoopRun
from tah2.model.reentry import Predicted
from tah2.model.weights import LOG_WEIGHTS


def log_weights(output: Output, run: LoopRun) -> list[Tensor]:
    """The logarithm of each executed depth's weight, one fp32 tensor `[N_m]` per pass."""
    logits = [current.continue_logit for current in run.passes[:-1] if current.continue_logit is not None]
    return LOG_WEIGHTS[output](logits, [current.index for current in run.passes])


@dataclass
class DepthLogits:
    """One pass's logits `[n, vocabulary]` for those of its tokens that are kept."""

    rows: Tensor
    """kept-token numbers, long `[n]`, in the pass's order"""
    chosen: Tensor
    """bool `[N_m]`: which of the pass's tokens these are"""
    logits: Tensor
    predicted: Predicted | None = None


def mix(output: Output, run: LoopRun, count: int) -> Tensor:
    """The mixed distribution of `count` kept tokens as fp32 logits `[count, vocabulary]`.

    Every pass of `run` carries `DepthLogits`. A token whose distribution comes from one depth alone keeps that
    depth's logits untouched; a mixture is returned as log-probabilities.
    """
    readings: list[DepthLogits] = [current.reading for current in run.passes]
    first = readings[0]
    mixed = first.logits.new_empty(count, first.logits.shape[-1], dtype=torch.float32)
    mixed[first.rows] = first.logits.float()
    if output is Output.LAST:
        for reading in readings[1:]:
            mixed[reading.rows] = reading.logits.float()
        return mixed
    weights = [weight[reading.chosen] for weight, reading in zip(log_weights(output, run), readings, strict=True)]
    if len(readings) > 1:
        deep = torch.zeros(count, dtype=torch.bool, device=mixed.device)
        deep[readings[1].rows] = True
        share = mixed.new_empty(count)
        share[first.rows] = weights[0]
        mixed[deep] = share[deep, None] + mixed[deep].log_softmax(-1)
    for reading, weight in zip(readings[1:], weights[1:], strict=True):
        addend = weight[:, None] + reading.logits.float().log_softmax(-1)
        mixed[reading.rows] = torch.logaddexp(mixed[reading.rows], addend)
    return mixed
