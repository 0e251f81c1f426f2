"""The numbers that a training step or a validation reports, under names that do not change.

| name | meaning |
|---|---|
| `loss`, `loss/prediction`, `loss/decider` | per supervised token; `loss` is what is minimised |
| `accuracy`, `depth/m/accuracy` | top-1 of the last executed depth, and of depth m |
| `depth/mean`, `depth/m/share` | executed depths per token, share of all tokens that executed depth m |
| `depth/m/loss` | over the supervised tokens that executed depth m |
| `depth/m/loss_measured` | the same with the tokens that a lookahead measured there |
| `decider/m/continue_rate` | share of the tokens of depth m that went on |
| `decider/m/label_rate` | share of the labels of depth m that say continue |
| `decider/m/agreement`, `recall`, `precision` | decisions against labels; the latter two of "continue" |
| `decider/m/gain`, `gain_std` | of depth m + 1 over depth m, in nats, wherever it was measured |
| `decider/m/cutoff`, `beta`, `absent_class` | means over micro-batches; share of these in which one class is absent |
| `compute/flops`, `compute/flops_paper` | with the lookahead that ran, and with the paper's |
| `compute/label_share_actual`, `label_share_paper` | the lookahead's share of these FLOPs |
| `compute/lookahead_tokens_actual`, `.._paper` | tokens of lookaheads |
| `data/tokens`, `data/supervised_tokens`, `speed/tokens_per_second`, `speed/seconds` | over all ranks |
| `optim/lr`, `optim/grad_norm`, `memory/peak_bytes` | as given |
"""

from __future__ import annotations

from dataclasses import dataclass

from tah2.compute.train import TrainFlops
from tah2.objective.losses import DECIDER_COEFFICIENT
from tah2.train.depth_stats import DepthStats


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
    """The sums of `DepthStats` and the ratios that are made of them."""

    def __init__(self, stats: DepthStats) -> None:
        self.of, self.total = stats.numbers()
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
