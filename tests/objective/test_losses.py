"""Losses against their formulas; exactness under gradient accumulation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tah2.model.weights import uniform_log_weights
from tah2.objective.balance import class_balance, class_counts
from tah2.objective.head import nll_sum, read_head
from tah2.objective.losses import (
    decider_loss,
    exit_gate_loss,
    fixed_mixture_loss,
    joint_loss,
    prediction_loss,
    uniform_depth_loss,
)
from tah2.objective.mixture import mixture_logprob

label_lists = st.lists(st.booleans(), max_size=12)


@given(st.lists(label_lists, min_size=1, max_size=4))
def test_balance_is_the_stop_to_continue_ratio_or_one(labels: list[list[bool]]) -> None:
    counts = class_counts([torch.tensor(depth, dtype=torch.bool) for depth in labels])
    assert counts.tolist() == [[depth.count(False), depth.count(True)] for depth in labels]
    expected = [d.count(False) / d.count(True) if 0 < d.count(True) < len(d) else 1.0 for d in labels]
    torch.testing.assert_close(class_balance(counts), torch.tensor(expected))


def test_no_depths_give_no_balance() -> None:
    assert class_balance(class_counts([])).shape == (0,)


@settings(deadline=None)
@given(st.integers(0, 9999))
def test_decider_loss_follows_the_formula(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = [5, 3, 0]
    logits = [torch.randn(n, generator=draw).requires_grad_() for n in sizes]
    labels = [torch.rand(n, generator=draw) < 0.5 for n in sizes]
    weights = [torch.rand(n, generator=draw) for n in sizes]
    balance = torch.tensor([2.0, 0.5, 1.0])
    expected = 0.0
    for depth_logits, depth_labels, depth_weights, beta in zip(logits, labels, weights, balance.tolist(), strict=True):
        for z, c, w in zip(depth_logits.tolist(), depth_labels.tolist(), depth_weights.tolist(), strict=True):
            g = 1 / (1 + math.exp(-z))
            expected += w * (-beta * math.log(g) if c else -math.log(1 - g)) / 7
    mine = decider_loss(logits, labels, weights, balance, supervised_tokens=7)
    assert mine.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_decider_loss_pushes_logits_towards_their_labels() -> None:
    logits = torch.zeros(2, requires_grad=True)
    decider_loss([logits], [torch.tensor([True, False])], [torch.ones(2)], torch.ones(1), 2).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [-0.25, 0.25]


def test_joint_loss_adds_the_decider_with_its_coefficient() -> None:
    loss = joint_loss(torch.tensor(2.0), torch.tensor(4.0))
    assert [part.item() for part in loss] == pytest.approx([2.2, 2.0, 4.0])
    assert joint_loss(torch.tensor(2.0), torch.tensor(4.0), coefficient=1.0).total.item() == 6.0


def test_prediction_loss_ignores_unsupervised_tokens_even_in_its_gradient() -> None:
    logprob = torch.tensor([-1.0, -math.inf, -3.0], requires_grad=True)
    loss = prediction_loss(logprob, torch.tensor([True, False, True]), supervised_tokens=8)
    assert loss.item() == 0.5
    assert torch.autograd.grad(loss, logprob)[0].tolist() == [-0.125, 0.0, -0.125]


def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch() -> None:
    logprob, supervised = -torch.rand(10), torch.rand(10) < 0.6
    exits, deeper = torch.randn(10), -torch.rand(10)
    count = int(supervised.sum())

    def total(part: slice) -> torch.Tensor:
        gate = exit_gate_loss([exits[part]], [logprob[part], deeper[part]], supervised[part], count)
        fixed = fixed_mixture_loss([logprob[part], deeper[part]], supervised[part], count)
        return prediction_loss(logprob[part], supervised[part], count) + gate + fixed

    torch.testing.assert_close(total(slice(0, 3)) + total(slice(3, 10)), total(slice(0, 10)))


def test_fixed_mixture_loss_is_the_uniform_mixture_at_equal_depths() -> None:
    logprobs = [-torch.rand(5) for _ in range(3)]
    supervised = torch.tensor([True, True, False, True, True])
    mine = fixed_mixture_loss(logprobs, supervised, 4)
    plain = -torch.stack([logprob.exp() for logprob in logprobs]).mean(0).log()[supervised].mean()
    torch.testing.assert_close(mine, plain)
    executed = [torch.arange(5)] * 3
    ragged = mixture_logprob(uniform_log_weights([], executed), logprobs, executed)
    torch.testing.assert_close(mine, prediction_loss(ragged, supervised, 4))


def test_uniform_depth_loss_is_the_mean_of_depth_losses_and_equals_weighted_nll_sums() -> None:
    hidden = [torch.randn(6, 4) for _ in range(3)]
    weight, targets = torch.randn(9, 4), torch.tensor([1, -100, 3, 4, -100, 8])
    logprobs = [read_head(h, weight, targets).target_logprob for h in hidden]
    mine = uniform_depth_loss(logprobs, targets != -100, 4)
    torch.testing.assert_close(mine, sum(-logprob.sum() for logprob in logprobs) / 12)
    share = torch.full((6,), 1 / 12)
    torch.testing.assert_close(mine, sum(nll_sum(h, weight, targets, share) for h in hidden))


@settings(deadline=None)
@given(st.integers(0, 9999))
def test_exit_gate_loss_follows_the_formula(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    exits = [torch.randn(4, generator=draw) for _ in range(2)]
    logprobs = [-0.1 * torch.rand(4, generator=draw) for _ in range(3)]
    supervised = torch.tensor([True, True, False, True])
    expected = 0.0
    for m in range(2):
        for t in (0, 1, 3):
            improvement = max(0.0, -logprobs[m][t].item() + logprobs[m + 1][t].item())
            target = 1 / (1 + math.exp(-50 * (improvement - 0.005)))
            stay = 1 - 1 / (1 + math.exp(-exits[m][t].item()))
            expected += -(target * math.log(stay) + (1 - target) * math.log(1 - stay)) / (3 * 3)
    assert exit_gate_loss(exits, logprobs, supervised, 3).item() == pytest.approx(expected, rel=1e-4)


def test_exit_gate_loss_trains_the_gate_alone_and_wants_one_gate_fewer_than_depths() -> None:
    exits = torch.zeros(2, requires_grad=True)
    logprobs = [torch.tensor([-3.0, -1.0], requires_grad=True), torch.tensor([-1.0, -3.0], requires_grad=True)]
    loss = exit_gate_loss([exits], logprobs, torch.ones(2, dtype=torch.bool), 2)
    gate, *heads = torch.autograd.grad(loss, [exits, *logprobs], allow_unused=True)
    assert heads == [None, None]
    assert gate is not None
    assert gate[0] > 0 > gate[1]  # exiting is discouraged where the next depth helps, encouraged where it does not
    with pytest.raises(ValueError, match="2 depths need 1 exit logits"):
        exit_gate_loss([exits, exits], logprobs, torch.ones(2, dtype=torch.bool), 2)
