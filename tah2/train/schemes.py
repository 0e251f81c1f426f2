"""Training schemes: how one micro-batch becomes a loss. A table, one small class per scheme.

| name | loss | used by |
|---|---|---|
| last-depth | next-token loss of the last depth | Standard, Huginn |
| every-depth | uniform mean of the depths' losses | Ouro, stage I |
| exit-gate | soft exit targets, frozen backbone | Ouro, stage II |
| uniform-mixture | loss of the uniform mixture | TaH2-fixed |
| lookahead | stopping mixture + decider supervised online | TaH2 and its ablations |
| oracle | last depth under oracle routing | the predecessor TaH, stage I |
| decider-only | decider on oracle labels, frozen backbone | the predecessor TaH, stage II |

Every loss is divided by the supervised tokens of the whole global batch, so micro-batches and ranks add up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tah2.config.strict import ConfigError, suggestion
from tah2.data.order import mixed_hash
from tah2.data.packing import IGNORE, PackedBatch
from tah2.model.gate import Gate
from tah2.model.kinds import Output
from tah2.model.loop import DepthPass, LoopedDecoder, LoopRun, LoopSettings, Router, Thresholded, Tokens
from tah2.model.weights import LOG_WEIGHTS
from tah2.objective.balance import class_balance, class_counts
from tah2.objective.evidence import Evidence, Measured, collect_evidence
from tah2.objective.head import nll_sum
from tah2.objective.labels import DepthLabels, continuation_labels, label_scheme, weight_scheme
from tah2.objective.losses import (
    decider_loss,
    exit_gate_loss,
    fixed_mixture_loss,
    joint_loss,
    prediction_loss,
)
from tah2.objective.mixture import mixture_logprob
from tah2.train.config import ObjectiveSection
from tah2.train.readers import TargetReader

ORACLE_LABELS = "first-depth-mismatch"


@dataclass(frozen=True)
class Supervision:
    """What the lookahead scheme learned about the decider on one micro-batch, for the logs."""

    evidence: list[Evidence]
    labels: list[DepthLabels]
    balance: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Outcome:
    """One micro-batch: the loss to differentiate, its parts, and what the logs want to know."""

    total: Tensor
    prediction: Tensor
    """Sum of the prediction loss over N, detached."""
    decider: Tensor
    run: LoopRun
    supervision: Supervision | None = None
    depth_losses: tuple[Tensor, ...] = ()
    """Loss of the depths that were read as sums alone, divided like `prediction`; the last one is the deepest"""


@dataclass(frozen=True)
class Context:
    """What a scheme knows beside the batch."""

    objective: ObjectiveSection
    supervised_tokens: int
    """N, of the whole global batch"""
    settings: LoopSettings
    group: dist.ProcessGroup | None = None
    seed: int = 0
    """Of this optimizer step: sampled decisions are a function of it"""
    continue_all: bool = False
    token_weight: Tensor | None = None
    """fp32 `[N]`, where kinds of tokens weigh differently"""


class Scheme(Protocol):
    options: tuple[str, ...]
    """Fields of the objective that change what the scheme does."""
    freezes_backbone: bool
    """Nothing but the gate learns."""
    looks_ahead: bool
    """Stopped tokens run once more without gradient."""

    def check(self, decoder: LoopedDecoder) -> None:
        """Refuse a model that the scheme cannot train, in one sentence."""
        ...

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome: ...


def tokens_of(batch: PackedBatch) -> Tokens:
    return Tokens(batch.ids, batch.document, batch.position)


class ContinueAll:
    """A router under which every token runs to the ceiling."""

    def __call__(
        self, gate: Gate, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading: Any
    ) -> Tensor:
        return torch.ones_like(probability, dtype=torch.bool)


@dataclass(frozen=True)
class Sampled:
    """Continue with the decider's own probability; noise is a function of (seed, depth, token)."""

    seed: int
    keys: NDArray[np.uint64]
    """`[N]`: names of the tokens, from `token_keys`"""

    def __call__(
        self, gate: Gate, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading: Any
    ) -> Tensor:
        bits = mixed_hash(self.seed, depth, self.keys[index.cpu().numpy()])
        noise = ((bits >> np.uint64(40)) * 2.0**-24).astype(np.float32)  # [0, 1) in steps that fp32 holds exactly
        return torch.from_numpy(noise).to(probability.device) < probability


def token_keys(batch: PackedBatch) -> NDArray[np.uint64]:
    """uint64 `[N]`: each token by the name of its sample and its position, however samples are packed."""
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in batch.samples or ("",)]
    names = np.frombuffer(b"".join(digests), np.uint64)
    return mixed_hash(names[batch.document.cpu().numpy()], batch.position.cpu().numpy())


@dataclass(frozen=True)
class Oracle:
    """The predecessor's training policy: continue where depth 1's most probable token is not the target."""

    targets: Tensor

    def __call__(
        self, gate: Gate, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading: Any
    ) -> Tensor:
        targets = self.targets[index]
        return (targets != IGNORE) & (reading.measured.top_token != targets) if depth == 1 else targets != IGNORE


class LastDepth:
    """1/N sum -log q^(last)[y*]; also forms the head's gradient while the logits are at hand."""

    options: tuple[str, ...] = ("tag_weights",)
    freezes_backbone = False
    looks_ahead = False

    def check(self, decoder: LoopedDecoder) -> None:
        if decoder.gate is not None:
            raise ConfigError(f"Scheme 'last-depth' trains no gate, but loop {decoder.kind.name!r} has one.")
        if decoder.ceiling() > 1 and decoder.kind.output is not Output.LAST:
            raise ConfigError(
                "Scheme 'last-depth' trains a prediction that this loop would not make: set 'loop.output' to 'last'."
            )

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome:
        run = decoder(tokens_of(batch), TargetReader(decoder.head_weight, batch.targets, False), context.settings)
        loss = nll_sum(run.final_state, decoder.head_weight, batch.targets, _weights(batch, context))
        return _plain(loss, run, (loss.detach(),))


class EveryDepth:
    """Ouro, stage I: 1/N sum_t 1/M sum_m l^(m); every token executes every depth."""

    options: tuple[str, ...] = ("tag_weights",)
    freezes_backbone = False
    looks_ahead = False

    def check(self, decoder: LoopedDecoder) -> None:
        if decoder.gate is not None or decoder.kind.loops_middle:
            raise ConfigError(f"Scheme 'every-depth' trains fixed whole-stack loops, not {decoder.kind.name!r}.")

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome:
        run = decoder(tokens_of(batch), TargetReader(decoder.head_weight, batch.targets, False), context.settings)
        weights, depths = _weights(batch, context) / len(run.passes), len(run.passes)
        losses = [nll_sum(current.state, decoder.head_weight, batch.targets, weights) for current in run.passes]
        return _plain(torch.stack(losses).sum(), run, tuple(loss.detach() * depths for loss in losses))


class UniformMixture:
    """TaH2-fixed: 1/N sum_t -log (1/M sum_m q^(m)[y*])."""

    options: tuple[str, ...] = ()
    freezes_backbone = False
    looks_ahead = False

    def check(self, decoder: LoopedDecoder) -> None:
        if decoder.gate is not None or decoder.kind.loops_middle:
            raise ConfigError(f"Scheme 'uniform-mixture' trains fixed whole-stack loops, not {decoder.kind.name!r}.")
        if decoder.kind.output is not Output.UNIFORM_MIXTURE:
            raise ConfigError(
                "Scheme 'uniform-mixture' trains a prediction that this loop would not make: "
                "set 'loop.output' to 'uniform-mixture'."
            )

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome:
        reader = TargetReader(decoder.head_weight, batch.targets, True)
        run = decoder(tokens_of(batch), reader, context.settings)
        logprobs = [current.reading.measured.target_logprob for current in run.passes]
        return _plain(fixed_mixture_loss(logprobs, batch.targets != IGNORE, context.supervised_tokens), run)


class ExitGateStage:
    """Ouro, stage II: the gate learns soft exit targets with all depths executed; nothing else trains."""

    options: tuple[str, ...] = ()
    freezes_backbone = True
    looks_ahead = False

    def check(self, decoder: LoopedDecoder) -> None:
        if decoder.gate is None or decoder.ceiling() < 2:
            raise ConfigError("Scheme 'exit-gate' needs a loop with a gate and at least two depths.")

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome:
        reader = TargetReader(decoder.head_weight, batch.targets, True)
        run = decoder(tokens_of(batch), reader, replace(context.settings, router=ContinueAll()))
        logprobs = [current.reading.measured.target_logprob for current in run.passes]
        exits = [-_logit(current) for current in run.passes[:-1]]
        supervised, count = batch.targets != IGNORE, context.supervised_tokens
        loss = exit_gate_loss(exits, logprobs, supervised, count)
        prediction = prediction_loss(logprobs[-1].detach(), supervised, count)
        return Outcome(loss + run.idle, prediction, loss.detach(), run)


class Lookahead:
    """TaH2: mixture likelihood plus the cost-sensitive decider loss on online labels (the joint objective)."""

    options: tuple[str, ...] = (
        "coverage",
        "decider_coefficient",
        "labels",
        "weights",
        "decisions",
        "continue_all_ratio",
    )
    freezes_backbone = False
    looks_ahead = True

    def check(self, decoder: LoopedDecoder) -> None:
        if decoder.gate is None or decoder.kind.loops_middle:
            raise ConfigError(f"Scheme 'lookahead' trains whole-stack loops with a decider, not {decoder.kind.name!r}.")

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome:
        objective, count = context.objective, context.supervised_tokens
        run = _looped(decoder, batch, context, _router(decoder, batch, context))
        logits, executed = _by_depth(run, decoder.ceiling(context.settings.max_depth))
        supervision = supervise(run, batch, decoder.ceiling(context.settings.max_depth), objective, context.group)
        decider = _decider_loss(run, supervision, count)
        weights = LOG_WEIGHTS[decoder.kind.output](logits, executed)
        logprobs = [current.reading.measured.target_logprob for current in run.passes]
        logprob = mixture_logprob(weights[: len(run.passes)], logprobs, executed[: len(run.passes)])
        prediction = prediction_loss(logprob, batch.targets != IGNORE, count)
        loss = joint_loss(prediction, decider, objective.decider_coefficient)
        return Outcome(loss.total + run.idle, prediction.detach(), decider.detach(), run, supervision)


class OracleStage:
    """The predecessor TaH, stage I: the backbone learns under the oracle policy; the last depth predicts."""

    options: tuple[str, ...] = ()
    freezes_backbone = False
    looks_ahead = False

    def check(self, decoder: LoopedDecoder) -> None:
        if decoder.gate is None or decoder.kind.output is not Output.LAST:
            raise ConfigError("Scheme 'oracle' needs a loop with a decider and loop.output=last.")

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome:
        run = _looped(decoder, batch, context, Oracle(batch.targets), lookahead=False)
        return _plain(_last_depth_loss(run, batch, context.supervised_tokens), run)


class DeciderStage:
    """The predecessor TaH, stage II: the decider alone learns the oracle's decisions, under the oracle policy."""

    options: tuple[str, ...] = ()
    freezes_backbone = True
    looks_ahead = False

    def check(self, decoder: LoopedDecoder) -> None:
        OracleStage().check(decoder)

    def __call__(self, decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Outcome:
        run = _looped(decoder, batch, context, Oracle(batch.targets), lookahead=False)
        labels = replace(context.objective, labels=ORACLE_LABELS, weights="uniform")
        supervision = supervise(run, batch, decoder.ceiling(context.settings.max_depth), labels, context.group)
        loss = _decider_loss(run, supervision, context.supervised_tokens)
        prediction = _last_depth_loss(run, batch, context.supervised_tokens).detach()
        return Outcome(loss + run.idle, prediction, loss.detach(), run, supervision)


SCHEMES: dict[str, Callable[[], Scheme]] = {
    "last-depth": LastDepth,
    "every-depth": EveryDepth,
    "exit-gate": ExitGateStage,
    "uniform-mixture": UniformMixture,
    "lookahead": Lookahead,
    "oracle": OracleStage,
    "decider-only": DeciderStage,
}


def scheme_for(decoder: LoopedDecoder, objective: ObjectiveSection) -> Scheme:
    """The scheme that the objective names, or the loop kind's own; checked against the model."""
    name = objective.scheme or decoder.kind.training
    if name not in SCHEMES:
        raise ConfigError(f"Unknown training scheme {name!r}{suggestion(name, SCHEMES)}.")
    scheme = SCHEMES[name]()
    scheme.check(decoder)
    default = ObjectiveSection()
    for field in fields(objective):
        given = getattr(objective, field.name) != getattr(default, field.name)
        if given and field.name not in ("scheme", *scheme.options):
            raise ConfigError(f"Scheme {name!r} has no use for 'objective.{field.name}'; leave it out.")
    return scheme


def supervise(
    run: LoopRun, batch: PackedBatch, ceiling: int, objective: ObjectiveSection, group: dist.ProcessGroup | None
) -> Supervision:
    """Labels, weights and class balance of depths 1 .. M-1 from what the run measured."""
    nobody = _nobody(batch)
    executed = [current.reading.measured for current in run.passes]
    executed += [nobody] * (ceiling - len(executed))
    probes = {probe.depth: probe.reading.measured for probe in run.lookaheads}
    evidence = collect_evidence(executed, [probes.get(depth, nobody) for depth in range(2, ceiling + 1)], batch.targets)
    labels = continuation_labels(
        evidence,
        len(batch),
        coverage=objective.coverage,
        labels=label_scheme(objective.labels),
        weights=weight_scheme(objective.weights),
        group=group,
    )
    counts = class_counts([depth.continues for depth in labels], group)
    return Supervision(evidence, labels, class_balance(counts).to(batch.ids.device), counts)


def _last_depth_loss(run: LoopRun, batch: PackedBatch, supervised_tokens: int) -> Tensor:
    """Next-token loss of each token's last executed depth, whose head was read inside the loop."""
    executed = [current.index for current in run.passes]
    logprobs = [current.reading.measured.target_logprob for current in run.passes]
    logprob = mixture_logprob(LOG_WEIGHTS[Output.LAST]([], executed), logprobs, executed)
    return prediction_loss(logprob, batch.targets != IGNORE, supervised_tokens)


def _decider_loss(run: LoopRun, supervision: Supervision, supervised_tokens: int) -> Tensor:
    empty = run.idle.new_zeros(0, dtype=torch.float32)
    logits = [
        _logit(run.passes[depth])[evidence.row] if depth < len(run.passes) else empty
        for depth, evidence in enumerate(supervision.evidence)
    ]
    labels = [depth.continues for depth in supervision.labels]
    weights = [depth.weight for depth in supervision.labels]
    return decider_loss(logits, labels, weights, supervision.balance, supervised_tokens)


def _looped(
    decoder: LoopedDecoder, batch: PackedBatch, context: Context, router: Router, lookahead: bool = True
) -> LoopRun:
    probed = (batch.targets != IGNORE) if lookahead else None
    settings = replace(context.settings, router=router, lookahead=probed)
    return decoder(tokens_of(batch), TargetReader(decoder.head_weight, batch.targets, True), settings)


def _router(decoder: LoopedDecoder, batch: PackedBatch, context: Context) -> Router:
    if context.continue_all:
        return ContinueAll()
    if context.objective.decisions == "sampled":
        return Sampled(context.seed, token_keys(batch))
    return Thresholded(decoder.loop.exit_threshold)


def _by_depth(run: LoopRun, ceiling: int) -> tuple[list[Tensor], list[Tensor]]:
    """Continue logits of depths below the ceiling and executed tokens of all, empty where nobody came."""
    nobody = run.executed[:0]
    logits = [_logit(current) for current in run.passes if current.depth < ceiling]
    executed = [current.index for current in run.passes]
    missing = ceiling - len(executed)
    return logits + [run.idle.new_zeros(0)] * (ceiling - 1 - len(logits)), executed + [nobody] * missing


def _logit(current: DepthPass) -> Tensor:
    assert current.continue_logit is not None
    return current.continue_logit


def _nobody(batch: PackedBatch) -> Measured:
    empty = batch.ids[:0]
    return Measured(empty, empty.float(), empty)


def _weights(batch: PackedBatch, context: Context) -> Tensor:
    if context.token_weight is not None:
        return context.token_weight / context.supervised_tokens
    return torch.full(batch.ids.shape, 1.0 / context.supervised_tokens, device=batch.ids.device)


def _plain(loss: Tensor, run: LoopRun, depth_losses: tuple[Tensor, ...] = ()) -> Outcome:
    nothing = torch.zeros_like(loss.detach())
    return Outcome(loss + run.idle, loss.detach(), nothing, run, depth_losses=depth_losses)
