"""What training learns about each depth, as sums that add up over micro-batches, steps and ranks.

`DepthObservation` holds one depth of one micro-batch as plain tensors, `DepthStats` their sums. Sums stay on
their device until they are read: observing never waits for it.

    a^(m)   executed          c^(m)   label               l^(m) = -log q^(m)[y*]
    N_m     tokens of depth m delta^(m) = l^(m) - l^(m+1) (the gain of a further pass)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tah2.objective.cutoff import Cutoff
from tah2.objective.head import NO_TARGET
from tah2.objective.pooling import pool_sum

Number = Tensor | float
"""A scalar, wherever it lives."""


@dataclass(frozen=True)
class DepthObservation:
    """One depth of one micro-batch: N_m tokens executed it, n of them are supervised."""

    executed: int
    """N_m."""
    loss: Tensor | None = None
    """fp32 `[n]`: l^(m); or only its sum, a scalar, beside `supervised`; None where the depth's head was not read."""
    supervised: int | None = None
    """n, where `loss` does not show it."""
    correct: Tensor | None = None
    """bool `[n]`: the depth's most probable token is the target."""
    continued: Number | None = None
    """How many of the N_m tokens went on; None where there was nothing to decide (the ceiling)."""
    decision: Tensor | None = None
    """bool `[n]`: which supervised tokens went on."""
    next_loss: Tensor | None = None
    """fp32 `[n]`: l^(m+1); NaN where neither a pass nor a lookahead measured it."""
    label: Tensor | None = None
    """bool `[n]`: c^(m)."""
    decider_loss: Number = 0.0
    """The sum over tokens of this depth's weighted decider loss, where it is known depth by depth."""
    cutoff: Cutoff | None = None
    beta: Number | None = None
    class_counts: Tensor | None = None
    """(stop, continue) labels `[2]` that made beta, pooled over ranks; by default those of `label`."""
    lookahead: int | None = None
    """Tokens that a lookahead ran for; None where no lookahead was asked for."""

    @classmethod
    def of_pass(
        cls,
        index: Tensor,
        targets: Tensor,
        target_logprob: Tensor,
        top_token: Tensor | None = None,
        continues: Tensor | None = None,
    ) -> DepthObservation:
        """The depth's pass over tokens `index` long `[N_m]` of a batch with `targets` long `[N]`.

        `target_logprob` fp32, `top_token` long and `continues` bool (the decisions) are `[N_m]`. Supervised rows
        keep their order, so labels and next losses of the same depth's `Evidence` fit `labelled`.
        """
        row = (targets[index] != NO_TARGET).nonzero()[:, 0]
        return cls(
            executed=len(index),
            loss=-target_logprob.detach().float()[row],
            correct=None if top_token is None else top_token[row] == targets[index[row]],
            continued=None if continues is None else continues.sum(),
            decision=None if continues is None else continues[row],
        )

    def __post_init__(self) -> None:
        if self.loss is not None and self.loss.dim() == 0 and (self.supervised is None or self.next_loss is not None):
            raise ValueError("A depth's summed loss needs `supervised`, and a gain needs one loss per token.")

    def labelled(
        self,
        next_loss: Tensor,
        label: Tensor,
        cutoff: Cutoff | None = None,
        *,
        beta: Number | None = None,
        class_counts: Tensor | None = None,
        decider_loss: Number = 0.0,
        lookahead: int | None = None,
    ) -> DepthObservation:
        """This depth with the decider's supervision; `next_loss` and `label` `[n]`."""
        if self.decision is None:
            raise ValueError("A depth without decisions has nothing to label: give `continues` to `of_pass`.")
        return replace(
            self,
            next_loss=next_loss,
            label=label,
            cutoff=cutoff,
            beta=beta,
            class_counts=class_counts,
            decider_loss=decider_loss,
            lookahead=lookahead,
        )


@dataclass(frozen=True)
class DepthStats:
    """Sums over micro-batches and ranks: float64 `[M]` per depth m = 1 .. M, then float64 scalars."""

    executed: Tensor
    supervised: Tensor
    """Supervised tokens among the executed ones."""
    loss: Tensor
    """Sum of l^(m) over supervised tokens that executed depth m."""
    graded: Tensor
    """Supervised tokens whose most probable token is known."""
    correct: Tensor
    decided: Tensor
    """Tokens that were told to go on or to stop."""
    continued: Tensor
    labels: Tensor
    """Tokens with a label."""
    labelled_continue: Tensor
    continued_labelled: Tensor
    """Tokens with a label, of either kind, that went on."""
    agreed: Tensor
    """Tokens whose decision is their label."""
    decider_loss: Tensor
    probed: Tensor
    """Supervised tokens of depth m whose l^(m+1) is known, from a pass or a lookahead."""
    next_loss: Tensor
    """Sum of l^(m+1) over the probed tokens."""
    gain: Tensor
    gain_squared: Tensor
    cutoff: Tensor
    cutoffs: Tensor
    """Micro-batches that had a cutoff, that is, a positive gain."""
    beta: Tensor
    absent: Tensor
    """Micro-batches in which one class of labels is absent."""
    label_batches: Tensor
    """Micro-batches with labels."""
    lookahead_actual: Tensor
    """Tokens that a lookahead ran for after depth m."""
    lookahead_paper: Tensor
    """Tokens that the paper's lookahead would run: all N_m."""
    micro_batches: Tensor
    supervised_tokens: Tensor
    prediction_loss: Tensor
    """Sum over supervised tokens of the prediction loss (for TaH2: the mixture's)."""
    gate_loss: Tensor
    """Sum over depths and supervised tokens of what trains the decider or exit gate."""
    last_correct: Tensor
    """Supervised tokens whose last executed depth ranks the target first."""

    @property
    def max_depth(self) -> int:
        return len(self.executed)

    @classmethod
    def zero(cls, max_depth: int, device: torch.device | str = "cpu") -> DepthStats:
        size = len(_PER_DEPTH) * max_depth + len(_TOTALS)
        return cls.from_tensor(torch.zeros(size, dtype=torch.float64, device=device), max_depth)

    @classmethod
    def observe(
        cls,
        depths: Sequence[DepthObservation],
        max_depth: int,
        *,
        supervised_tokens: int | None = None,
        prediction_loss: Number | None = None,
        gate_loss: Number | None = None,
    ) -> DepthStats:
        """Sums of one micro-batch; `depths` holds depth 1, 2, ... as far as any token went, M at most.

        `prediction_loss` and `gate_loss` are sums over supervised tokens, not means. By default the first is the
        loss of the one depth there is, the second the sum of the depths' decider losses, and the supervised
        tokens are those of depth 1.
        """
        if not 0 < len(depths) <= max_depth:
            raise ValueError(f"A micro-batch has 1 to {max_depth} depths, not {len(depths)}.")
        first = depths[0]
        if prediction_loss is None:
            if len(depths) > 1 or first.loss is None:
                raise ValueError("Say what the prediction loss is, unless there is one depth with a loss.")
            prediction_loss = first.loss.double().sum()
        device = _device(depths, prediction_loss)
        nothing = _scalar(0.0, device)
        sums = [{name: _scalar(value, device) for name, value in _depth_sums(depth).items()} for depth in depths]
        rows = [
            torch.stack([each.get(name, nothing) for each in sums] + [nothing] * (max_depth - len(sums)))
            for name in _PER_DEPTH
        ]
        totals: dict[str, Number] = {
            "micro_batches": 1.0,
            "supervised_tokens": _supervised(first) if supervised_tokens is None else supervised_tokens,
            "prediction_loss": prediction_loss,
            "gate_loss": rows[_PER_DEPTH.index("decider_loss")].sum() if gate_loss is None else gate_loss,
            "last_correct": sum((_last_correct(depth, depth is depths[-1]).to(device) for depth in depths), nothing),
        }
        return cls(*[*rows, *[_scalar(totals[name], device) for name in _TOTALS]])

    def __add__(self, other: DepthStats) -> DepthStats:
        if self.max_depth != other.max_depth:
            raise ValueError(f"Statistics of ceilings {self.max_depth} and {other.max_depth} cannot be added.")
        return DepthStats.from_tensor(self.to_tensor() + other.to_tensor(), self.max_depth)

    def to_tensor(self) -> Tensor:
        """All sums as one float64 vector; the sum of vectors is the vector of the sum."""
        parts = [getattr(self, name) for name in _PER_DEPTH] + [getattr(self, name)[None] for name in _TOTALS]
        return torch.cat(parts)

    @classmethod
    def from_tensor(cls, flat: Tensor, max_depth: int) -> DepthStats:
        """The inverse of `to_tensor`."""
        split = len(_PER_DEPTH) * max_depth
        if flat.shape != (split + len(_TOTALS),):
            raise ValueError(f"Statistics of {max_depth} depths do not fit a tensor of shape {tuple(flat.shape)}.")
        return cls(*[*flat[:split].view(-1, max_depth), *flat[split:]])

    def numbers(self) -> tuple[dict[str, list[float]], dict[str, float]]:
        """(sums per depth, totals) by name as Python numbers, in one copy from the device."""
        flat, split = self.to_tensor().tolist(), len(_PER_DEPTH) * self.max_depth
        rows = [flat[start : start + self.max_depth] for start in range(0, split, self.max_depth)]
        return dict(zip(_PER_DEPTH, rows, strict=True)), dict(zip(_TOTALS, flat[split:], strict=True))

    def pooled(self, group: dist.ProcessGroup | None) -> DepthStats:
        """The sum over the ranks of `group`, all of which must call this."""
        return self if group is None else DepthStats.from_tensor(pool_sum(self.to_tensor(), group), self.max_depth)


_TOTALS = ("micro_batches", "supervised_tokens", "prediction_loss", "gate_loss", "last_correct")
_PER_DEPTH = tuple(field.name for field in fields(DepthStats) if field.name not in _TOTALS)


def _depth_sums(depth: DepthObservation) -> dict[str, Number]:
    sums: dict[str, Number] = {"executed": depth.executed, "decider_loss": depth.decider_loss}
    if depth.loss is not None:
        sums |= {"supervised": _supervised(depth), "loss": depth.loss.double().sum()}
    if depth.correct is not None:
        sums |= {"graded": len(depth.correct), "correct": depth.correct.sum()}
    if depth.continued is not None:
        sums |= {"decided": depth.executed, "continued": depth.continued}
    if depth.lookahead is not None:
        sums |= {"lookahead_actual": depth.lookahead, "lookahead_paper": depth.executed}
    if depth.loss is not None and depth.next_loss is not None:
        gain = (depth.loss - depth.next_loss).double()
        sums |= {
            "probed": (~depth.next_loss.isnan()).sum(),
            "next_loss": depth.next_loss.double().nansum(),
            "gain": gain.nansum(),
            "gain_squared": gain.square().nansum(),
        }
    return sums | _label_sums(depth)


def _label_sums(depth: DepthObservation) -> dict[str, Number]:
    if depth.label is None or depth.decision is None:
        return {}
    go_on = depth.label.sum()
    stop, present = (len(depth.label) - go_on, go_on) if depth.class_counts is None else depth.class_counts
    sums: dict[str, Number] = {
        "labels": len(depth.label),
        "labelled_continue": go_on,
        "continued_labelled": depth.decision.sum(),
        "agreed": (depth.decision == depth.label).sum(),
        "label_batches": 1,
        "beta": 1.0 if depth.beta is None else depth.beta,
        "absent": (stop == 0) | (present == 0),
    }
    if depth.cutoff is not None and depth.cutoff.any_positive:
        sums |= {"cutoff": depth.cutoff.value, "cutoffs": 1}
    return sums


def _last_correct(depth: DepthObservation, deepest: bool) -> Tensor:
    """How many of the tokens whose last depth is this one it predicts."""
    if depth.correct is None or (depth.decision is None and not deepest):
        return torch.zeros((), dtype=torch.float64)
    stops = depth.correct if depth.decision is None else depth.correct & ~depth.decision
    return stops.sum().double()


def _supervised(depth: DepthObservation) -> int:
    if depth.supervised is not None or depth.loss is None:
        return depth.supervised or 0
    return len(depth.loss)


def _device(depths: Sequence[DepthObservation], prediction_loss: Number) -> torch.device:
    known = [depth.loss for depth in depths if depth.loss is not None]
    known += [prediction_loss] if isinstance(prediction_loss, Tensor) else []
    return known[0].device if known else torch.device("cpu")


def _scalar(value: Number, device: torch.device) -> Tensor:
    """`value` as a float64 scalar on `device`, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
