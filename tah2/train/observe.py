"""From one micro-batch's outcome to the sums that the logs are made of."""

from __future__ import annotations

from dataclasses import replace

from tah2.compute.train import TrainCounts, TrainFlops, train_flops_recorded
from tah2.data.packing import IGNORE, PackedBatch
from tah2.model.loop import LoopedDecoder
from tah2.train.depth_stats import DepthObservation, DepthStats
from tah2.train.readers import TargetReading
from tah2.train.schemes import Outcome


def observe(
    outcome: Outcome, batch: PackedBatch, ceiling: int, supervised_tokens: int, looks_ahead: bool = True
) -> DepthStats:
    """Sums of one micro-batch; `supervised_tokens` is the N by which the outcome's losses are divided."""
    depths = [_depth(outcome, number, batch, supervised_tokens) for number in range(len(outcome.run.passes))]
    if not looks_ahead:
        depths = [replace(depth, lookahead=None) for depth in depths]
    return DepthStats.observe(
        depths,
        ceiling,
        supervised_tokens=batch.supervised_tokens,
        prediction_loss=outcome.prediction * supervised_tokens,
        gate_loss=outcome.decider * supervised_tokens,
    )


def count(
    outcome: Outcome, batch: PackedBatch, decoder: LoopedDecoder, ceiling: int, looks_ahead: bool = True
) -> TrainCounts:
    """Tokens and query-key pairs that the micro-batch ran; those of lookaheads only where the scheme has them."""
    rule, executed = decoder.kind.rule, outcome.run.executed
    counts = TrainCounts.of(rule, batch.document, executed, ceiling, supervised=batch.targets != IGNORE)
    if looks_ahead:
        return counts
    zero = TrainCounts.zero(ceiling)
    return replace(zero, tokens=counts.tokens, pairs=counts.pairs, once=counts.once)


def flops_of(counts: TrainCounts, decoder: LoopedDecoder, freezes_backbone: bool) -> TrainFlops:
    """Training FLOPs of what ran; behind a frozen backbone there is no backward pass worth counting."""
    flops = train_flops_recorded(decoder.backbone, decoder.loop, counts)
    return replace(flops, forward_backward=flops.forward_backward / 3) if freezes_backbone else flops


def _depth(outcome: Outcome, number: int, batch: PackedBatch, supervised_tokens: int) -> DepthObservation:
    current = outcome.run.passes[number]
    if not isinstance(current.reading, TargetReading):
        offset = len(outcome.run.passes) - len(outcome.depth_losses)
        if number < offset or not outcome.depth_losses:
            return DepthObservation(executed=len(current.index))
        loss = outcome.depth_losses[number - offset] * supervised_tokens
        return DepthObservation(executed=len(current.index), loss=loss, supervised=batch.supervised_tokens)
    measured = current.reading.measured
    observed = DepthObservation.of_pass(
        current.index, batch.targets, measured.target_logprob, measured.top_token, current.continues
    )
    supervision = outcome.supervision
    if supervision is None or number >= len(supervision.evidence) or current.continues is None:
        return observed
    probes = {probe.depth: len(probe.index) for probe in outcome.run.lookaheads}
    return observed.labelled(
        supervision.evidence[number].next_loss,
        supervision.labels[number].continues,
        supervision.labels[number].cutoff,
        beta=supervision.balance[number],
        class_counts=supervision.counts[number],
        lookahead=probes.get(current.depth + 1, 0),
    )
