"""A run that goes wrong is told so in words, once, after it lasted; a broken number stops it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tah2.config.strict import ConfigError
from tah2.train.health import HealthConfig, HealthMonitor, NonFiniteLoss

PATIENCE = 3


def step_metrics(**decider: float) -> dict[str, float]:
    """A healthy step of a model with two depths, but for what is given."""
    healthy = {"continue_rate": 0.1, "label_rate": 0.1, "absent_class": 0.0, "gain": -0.05}
    metrics = {"depth/1/share": 1.0, "depth/2/share": 0.1, "depth/3/share": 0.0}
    return metrics | {f"decider/1/{name}": value for name, value in (healthy | decider).items()}


def told(metrics: dict[str, float], steps: int = PATIENCE, **config: float) -> list[str]:
    """All that a fresh monitor says over some equal steps."""
    monitor = HealthMonitor(HealthConfig(patience=PATIENCE, **config))  # type: ignore[arg-type]
    return [text for step in range(1, steps + 1) for text in monitor.check(step, metrics)]


def test_a_healthy_run_hears_nothing():
    assert told(step_metrics(), 50) == []


@pytest.mark.parametrize(
    ("decider", "words"),
    [
        ({"continue_rate": 0.0, "label_rate": 0.2}, ["stops every token after depth 1", "20.0%", "learning rate"]),
        ({"continue_rate": 0.0, "label_rate": 0.0}, ["stops every token", "labels agree", "start state"]),
        ({"continue_rate": 1.0, "label_rate": 0.2}, ["every token continue", "80.0% of the labels say stop"]),
        ({"continue_rate": 1.0, "label_rate": 1.0}, ["every token continue", "labels agree", "coverage"]),
        ({"absent_class": 0.9, "label_rate": 0.01}, ["90%", "says continue", "larger micro-batches"]),
        ({"absent_class": 0.9, "label_rate": 0.99}, ["90%", "says stop", "lower gain coverage"]),
        ({"gain": -8.5}, ["Depth 2 predicts worse than depth 1 by 8.50 nats", "start state"]),
    ],
)
def test_each_problem_is_named_with_a_remedy(decider: dict[str, float], words: list[str]):
    (text,) = told(step_metrics(**decider))
    assert [word for word in words if word not in text] == []


def test_a_problem_is_told_only_after_it_lasted_and_only_once():
    ill = step_metrics(gain=-2.0)
    assert told(ill, PATIENCE - 1) == []
    assert len(told(ill, 10 * PATIENCE)) == 1


def test_an_interruption_starts_the_count_again():
    monitor = HealthMonitor(HealthConfig(patience=PATIENCE))
    pattern = [-2.0, -2.0, 0.0] * 10
    assert [text for step, gain in enumerate(pattern, 1) for text in monitor.check(step, step_metrics(gain=gain))] == []


def test_a_problem_that_returns_after_recovery_is_told_again():
    monitor = HealthMonitor(HealthConfig(patience=PATIENCE))
    ill, well = step_metrics(gain=-2.0), step_metrics()

    def news(metrics: dict[str, float], steps: int) -> int:
        return sum(len(monitor.check(1, metrics)) for _ in range(steps))

    assert news(ill, PATIENCE) == 1
    assert news(well, PATIENCE - 1) + news(ill, PATIENCE) == 0
    assert news(well, PATIENCE) + news(ill, PATIENCE) == 1


def test_the_warm_up_is_not_judged():
    ill = step_metrics(continue_rate=1.0)
    assert told(ill, 10, warmup_steps=10) == []
    assert len(told(ill, 10 + PATIENCE, warmup_steps=10)) == 1


def test_a_depth_that_nobody_reaches_is_neither_ill_nor_well():
    monitor = HealthMonitor(HealthConfig(patience=2))
    unreached = {"depth/1/share": 1.0, "depth/2/share": 0.0}
    monitor.check(1, step_metrics(gain=-2.0))
    assert monitor.check(2, unreached) == []
    assert len(monitor.check(3, step_metrics(gain=-2.0))) == 1


def test_loops_without_labels_have_no_decider_that_could_collapse():
    fixed = {"depth/1/share": 1.0, "depth/2/share": 1.0, "decider/1/continue_rate": 1.0, "decider/1/gain": 0.0}
    assert told(fixed, 50) == []


def test_depths_are_judged_apart():
    metrics = step_metrics(gain=-2.0) | {"decider/2/gain": -3.0, "decider/2/label_rate": 0.1}
    texts = told(metrics)
    assert len(texts) == 2
    assert "Depth 3 predicts worse than depth 2" in texts[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_loss_says_where_and_what_is_left(value: float):
    error = NonFiniteLoss(120, [2.31, value], Path("run/step-100"), value=value)
    words = ("step 120", "depth 1: 2.31", "depth 2", "run/step-100", str(value))
    assert [word for word in words if word not in str(error)] == []
    assert (error.step, error.checkpoint) == (120, Path("run/step-100"))


def test_a_missing_checkpoint_is_admitted():
    error = NonFiniteLoss(7, [], None, what="gradient norm")
    assert re.match(r"The gradient norm of step 7 is nan;.*no checkpoint yet", str(error))


def test_impossible_thresholds_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        HealthConfig(patience=0)
    with pytest.raises(ConfigError, match="collapse_rate"):
        HealthConfig(collapse_rate=0.7)
