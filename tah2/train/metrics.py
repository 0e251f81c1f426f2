"""What a training step reports about each depth, as sums that add up over micro-batches, steps and ranks.

`DepthObservation` holds one depth of one micro-batch as plain tensors, `DepthStats` their sums, `StepMetrics` the
flat names and numbers that loggers see. Sums stay on their device until they are read: observing never waits for it.

    a^(m)   executed          c^(m)   label               l^(m) = -log q^(m)[y*]
    N_m     tokens of depth m delta^(m) = l^(m) - l^(m+1) (the gain of a further pass)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tah2.compute.train import TrainFlops
from tah2.objective.cutoff import Cutoff
from tah2.objective.head import NO_TARGET
from tah2.objective.losses import DECIDER_COEFFICIENT
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
            prediction_loss = first.loss.sum()
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


@dataclass(frozen=True)
class StepMetrics:
    """What one logged step (or one validation) reports; parts that were not measured stay out of `flat`."""

    stats: DepthStats
    """Already pooled over ranks."""
    decider_coefficient: float = DECIDER_COEFFICIENT
    flops: TrainFlops | None = None
    seconds: float | None = None
    """Wall time that the tokens of `stats` took."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    peak_bytes: int | None = None

    def flat(self) -> dict[str, float]:
        """Names and numbers; a mean over nothing has no name. Waits for the device."""
        sums = _Sums(self.stats)
        rates = _Rates()
        sums.losses(rates, self.decider_coefficient)
        for m in range(1, self.stats.max_depth + 1):
            sums.depth(rates, m)
            sums.decider(rates, m)
        sums.lookahead(rates)
        if self.flops is not None:
            flops = self.flops
            rates.values["compute/flops"] = float(flops.total_actual)
            rates.values["compute/flops_paper"] = float(flops.total_paper)
            rates.ratio("compute/label_share_actual", flops.label_actual, flops.total_actual)
            rates.ratio("compute/label_share_paper", flops.label_paper, flops.total_paper)
        if self.seconds is not None:
            rates.ratio("speed/tokens_per_second", sums.tokens, self.seconds)
            rates.values["speed/seconds"] = self.seconds
        for name, value in (
            ("optim/lr", self.learning_rate),
            ("optim/grad_norm", self.gradient_norm),
            ("memory/peak_bytes", self.peak_bytes),
        ):
            if value is not None:
                rates.values[name] = float(value)
        return rates.values


class _Rates:
    """The metrics under construction."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def ratio(self, name: str, numerator: float, denominator: float) -> None:
        if denominator:
            self.values[name] = numerator / denominator


class _Sums:
    """The sums of `DepthStats` as Python numbers: one copy from the device."""

    def __init__(self, stats: DepthStats) -> None:
        flat = stats.to_tensor().tolist()
        depths = stats.max_depth
        self.of = {name: flat[i * depths : (i + 1) * depths] for i, name in enumerate(_PER_DEPTH)}
        self.total = dict(zip(_TOTALS, flat[len(_PER_DEPTH) * depths :], strict=True))
        self.tokens: float = self.of["executed"][0]
        self.supervised: float = self.total["supervised_tokens"]

    def losses(self, rates: _Rates, coefficient: float) -> None:
        prediction, decider = self.total["prediction_loss"], self.total["gate_loss"]
        rates.ratio("loss", prediction + coefficient * decider, self.supervised)
        rates.ratio("loss/prediction", prediction, self.supervised)
        if decider or any(self.of["labels"]):
            rates.ratio("loss/decider", decider, self.supervised)
        rates.ratio("accuracy", self.total["last_correct"], self.of["graded"][0])
        rates.ratio("depth/mean", sum(self.of["executed"]), self.tokens)
        rates.values |= {"data/tokens": self.tokens, "data/supervised_tokens": self.supervised}

    def depth(self, rates: _Rates, m: int) -> None:
        """What depth m predicts, over the tokens that executed it and over all that were measured there."""
        at = {name: values[m - 1] for name, values in self.of.items()}
        rates.ratio(f"depth/{m}/share", at["executed"], self.tokens)
        rates.ratio(f"depth/{m}/loss", at["loss"], at["supervised"])
        rates.ratio(f"depth/{m}/accuracy", at["correct"], at["graded"])
        if m > 1:
            rates.ratio(f"depth/{m}/loss_measured", self.of["next_loss"][m - 2], self.of["probed"][m - 2])

    def decider(self, rates: _Rates, m: int) -> None:
        """What was decided after depth m, what the labels say, and what a further pass gains."""
        at, name = {key: values[m - 1] for key, values in self.of.items()}, f"decider/{m}"
        rates.ratio(f"{name}/continue_rate", at["continued"], at["decided"])
        rates.ratio(f"{name}/label_rate", at["labelled_continue"], at["labels"])
        rates.ratio(f"{name}/agreement", at["agreed"], at["labels"])
        both = (at["agreed"] + at["continued_labelled"] + at["labelled_continue"] - at["labels"]) / 2
        rates.ratio(f"{name}/recall", both, at["labelled_continue"])
        rates.ratio(f"{name}/precision", both, at["continued_labelled"])
        if at["decider_loss"]:
            rates.ratio(f"{name}/loss", at["decider_loss"], self.supervised)
        rates.ratio(f"{name}/cutoff", at["cutoff"], at["cutoffs"])
        rates.ratio(f"{name}/beta", at["beta"], at["label_batches"])
        rates.ratio(f"{name}/absent_class", at["absent"], at["label_batches"])
        if at["probed"]:
            mean = at["gain"] / at["probed"]
            rates.values[f"{name}/gain"] = mean
            rates.values[f"{name}/gain_std"] = max(0.0, at["gain_squared"] / at["probed"] - mean**2) ** 0.5

    def lookahead(self, rates: _Rates) -> None:
        if any(self.of["lookahead_paper"]):
            rates.values["compute/lookahead_tokens_actual"] = sum(self.of["lookahead_actual"])
            rates.values["compute/lookahead_tokens_paper"] = sum(self.of["lookahead_paper"])
