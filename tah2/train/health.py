"""Tells people in plain words when a run goes wrong in one of the known ways, and what to try.

`HealthMonitor.check` reads the metrics of logged steps. A problem that lasts is told once; it is told again only
after it was gone for as long. `NonFiniteLoss` is how a run ends before a broken update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tah2.config.strict import ConfigError

Metrics = Mapping[str, float]


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite; the optimizer step was not made."""

    def __init__(
        self,
        step: int,
        depth_losses: Sequence[float],
        checkpoint: Path | None,
        *,
        what: str = "loss",
        value: float = math.nan,
    ) -> None:
        self.step, self.depth_losses, self.checkpoint = step, tuple(depth_losses), checkpoint
        depths = ", ".join(f"depth {m}: {loss:.4g}" for m, loss in enumerate(depth_losses, start=1))
        known = f" ({depths})" if depths else ""
        rescue = (
            "there is no checkpoint yet"
            if checkpoint is None
            else f"the last good checkpoint is {checkpoint}, from which the run can be resumed"
        )
        super().__init__(
            f"The {what} of step {step} is {value}{known}; training stopped before the update, and {rescue}. "
            "Try a lower learning rate, a longer warm-up or stronger clipping, and look at this step's data."
        )


@dataclass(frozen=True)
class HealthConfig:
    patience: int = 20
    """Consecutive logged steps that a problem must last before it is told, and be gone before it is told again."""
    warmup_steps: int = 0
    """Steps that are not judged: the learning rate's warm-up, and those in which every token continues."""
    collapse_rate: float = 0.001
    """All stop below this continue rate, all continue above one minus it."""
    absent_share: float = 0.5
    """Share of micro-batches without one of the classes above which labels are too one-sided."""
    worse_by: float = 0.5
    """Nats by which a further pass may lose on average."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"'patience' counts logged steps and must be at least 1, not {self.patience}.")
        if not 0 <= self.collapse_rate < 0.5:
            raise ConfigError(f"'collapse_rate' lies in [0, 0.5), not {self.collapse_rate}.")


class HealthMonitor:
    """Counts how long each problem has lasted at each depth."""

    def __init__(self, config: HealthConfig | None = None) -> None:
        self.config = config or HealthConfig()
        self._lasted: dict[tuple[str, int], int] = {}
        self._gone: dict[tuple[str, int], int] = {}
        self._told: set[tuple[str, int]] = set()

    def check(self, step: int, metrics: Metrics) -> list[str]:
        """What is newly wrong at this logged step; `metrics` as of `StepMetrics.flat`.

        A depth that no token reached in this step is not judged, neither as ill nor as well.
        """
        if step <= self.config.warmup_steps:
            return []
        news, m = [], 1
        while f"depth/{m}/share" in metrics:
            seen = _at_depth(metrics, m)
            for name, judge in JUDGES.items() if seen else ():
                text = judge(seen, m, self.config)
                if self._is_news((name, m), text is not None) and text is not None:
                    news.append(text)
            m += 1
        return news

    def _is_news(self, problem: tuple[str, int], present: bool) -> bool:
        """Counts the problem as present or gone; true when it is time to tell it."""
        if not present:
            self._lasted[problem] = 0
            self._gone[problem] = self._gone.get(problem, 0) + 1
            if self._gone[problem] >= self.config.patience:
                self._told.discard(problem)
            return False
        self._gone[problem] = 0
        self._lasted[problem] = self._lasted.get(problem, 0) + 1
        if self._lasted[problem] < self.config.patience or problem in self._told:
            return False
        self._told.add(problem)
        return True


def _at_depth(metrics: Metrics, m: int) -> dict[str, float]:
    prefix = f"decider/{m}/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _all_stop(seen: Metrics, m: int, config: HealthConfig) -> str | None:
    if "label_rate" not in seen or seen.get("continue_rate", 1.0) > config.collapse_rate:
        return None
    told = f"The decider stops every token after depth {m}"
    if seen["label_rate"] <= config.collapse_rate:
        return (
            f"{told}, and the labels agree: a further pass helps almost no token. Check the start state of the updater "
            "(fit it before training), let every token continue in the first 10 to 20% of the steps, or keep the "
            "model if the data needs no second pass."
        )
    return (
        f"{told}, although {seen['label_rate']:.1%} of the labels say continue. Try a higher learning rate for the "
        "decider, a larger decider coefficient, or letting every token continue in the first 10 to 20% of the steps."
    )


def _all_continue(seen: Metrics, m: int, config: HealthConfig) -> str | None:
    if "label_rate" not in seen or seen.get("continue_rate", 0.0) < 1 - config.collapse_rate:
        return None
    told = f"The decider lets every token continue after depth {m}"
    if seen["label_rate"] >= 1 - config.collapse_rate:
        return (
            f"{told}, and the labels agree: nearly every token gains from a further pass. Lower the gain coverage to "
            "keep only the larger gains, or train a fixed depth."
        )
    return (
        f"{told}, although {1 - seen['label_rate']:.1%} of the labels say stop. Try a higher learning rate for the "
        "decider or a larger decider coefficient, and check that the steps in which every token continues are over."
    )


def _one_class(seen: Metrics, m: int, config: HealthConfig) -> str | None:
    if seen.get("absent_class", 0.0) <= config.absent_share:
        return None
    rate = seen.get("label_rate", 0.0)
    which, remedy = (
        ("continue", "Use larger micro-batches, a higher gain coverage, or a better start state of the updater")
        if rate < 0.5
        else ("stop", "Use larger micro-batches or a lower gain coverage")
    )
    return (
        f"In {seen['absent_class']:.0%} of the micro-batches no label after depth {m} says {which}, so the decider's "
        f"classes cannot be balanced. {remedy}."
    )


def _worse_with_depth(seen: Metrics, m: int, config: HealthConfig) -> str | None:
    if not seen.get("gain", 0.0) < -config.worse_by:
        return None
    return (
        f"Depth {m + 1} predicts worse than depth {m} by {-seen['gain']:.2f} nats on average, so tokens are told to "
        "stop and never learn to use it. Fit the updater's start state before training, let every token continue in "
        "the first 10 to 20% of the steps, or lower the learning rate."
    )


JUDGES: dict[str, Callable[[Metrics, int, HealthConfig], str | None]] = {
    "all-stop": _all_stop,
    "all-continue": _all_continue,
    "one-class": _one_class,
    "worse-with-depth": _worse_with_depth,
}
"""Kinds of problem; each looks at the `decider/m/` metrics of one depth."""
