"""Stopping weights and the mixture likelihood against the paper's formulas, token by token."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tah2.model.kinds import Output
from tah2.model.weights import LOG_WEIGHTS, final_log_weights, stopping_log_weights, uniform_log_weights
from tah2.objective.mixture import mixture_logprob

depth_profiles = st.lists(st.integers(1, 4), min_size=1, max_size=9)


def ragged(profile: list[int], seed: int, max_depth: int = 4) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Executed tokens (in shuffled order beyond depth 1), continue logits and target log-probs per depth."""
    draw = torch.Generator().manual_seed(seed)
    executed = [torch.arange(len(profile))]
    for depth in range(2, max_depth + 1):
        tokens = torch.tensor([t for t, last in enumerate(profile) if last >= depth], dtype=torch.long)
        executed.append(tokens[torch.randperm(len(tokens), generator=draw)])
    logits = [(2 * torch.randn(len(t), generator=draw)).requires_grad_() for t in executed]
    logprobs = [(-3 * torch.rand(len(t), generator=draw)).requires_grad_() for t in executed]
    return executed, logits, logprobs


def weights_by_formula(profile: list[int], executed: list[Tensor], logits: list[Tensor]) -> list[dict[int, Tensor]]:
    """omega_t^(m) as written in the paper: one dictionary depth -> weight per token."""
    tables = []
    for token, last in enumerate(profile):
        g = [logits[m][executed[m].tolist().index(token)].sigmoid() for m in range(last)]
        reach = [math.prod(g[:m], start=torch.tensor(1.0)) for m in range(last)]
        tables.append({m + 1: reach[m] * (1 - g[m] if m + 1 < last else 1) for m in range(last)})
    return tables


@settings(deadline=None, max_examples=40)
@given(depth_profiles, st.integers(0, 99))
def test_stopping_weights_and_mixture_follow_the_formula(profile: list[int], seed: int) -> None:
    executed, logits, logprobs = ragged(profile, seed)
    log_weights = stopping_log_weights(logits[:-1], executed)
    mixed = mixture_logprob(log_weights, logprobs, executed)
    tables = weights_by_formula(profile, executed, logits)
    for depth, (tokens, values) in enumerate(zip(executed, log_weights, strict=True), start=1):
        for token, value in zip(tokens.tolist(), values, strict=True):
            torch.testing.assert_close(value.exp(), tables[token][depth], rtol=1e-5, atol=1e-6)
    expected = []
    for token, table in enumerate(tables):
        at = {depth: logprobs[depth - 1][executed[depth - 1].tolist().index(token)] for depth in table}
        expected.append(sum(weight * at[depth].exp() for depth, weight in table.items()))
    truth = torch.stack(expected).log()  # type: ignore[arg-type]
    torch.testing.assert_close(mixed, truth, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(mixed.sum(), [*logits, *logprobs], allow_unused=True, materialize_grads=True)
    true = torch.autograd.grad(truth.sum(), [*logits, *logprobs], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(depth_profiles, st.integers(0, 99), st.sampled_from(list(Output)))
def test_weights_of_every_output_rule_sum_to_one(profile: list[int], seed: int, rule: Output) -> None:
    executed, logits, _ = ragged(profile, seed)
    log_weights = LOG_WEIGHTS[rule](logits, executed)
    zeros = [torch.zeros(len(tokens)) for tokens in executed]
    torch.testing.assert_close(mixture_logprob(log_weights, zeros, executed), torch.zeros(len(profile)))


def test_uniform_rule_averages_the_executed_depths() -> None:
    executed, logits, logprobs = ragged([1, 3, 2], seed=0, max_depth=3)
    mixed = mixture_logprob(uniform_log_weights(logits, executed), logprobs, executed)

    def at(depth: int, token: int) -> Tensor:
        return logprobs[depth - 1][executed[depth - 1].tolist().index(token)].exp()

    expected = [at(1, 0), (at(1, 1) + at(2, 1) + at(3, 1)) / 3, (at(1, 2) + at(2, 2)) / 2]
    torch.testing.assert_close(mixed.exp(), torch.stack(expected))


def test_final_rule_reads_the_last_executed_depth_and_trains_it_alone() -> None:
    executed, logits, logprobs = ragged([1, 3, 2], seed=0, max_depth=3)
    mixed = mixture_logprob(final_log_weights(logits, executed), logprobs, executed)
    last = [logprobs[m][executed[m].tolist().index(token)] for token, m in ((0, 0), (1, 2), (2, 1))]
    torch.testing.assert_close(mixed, torch.stack(last))
    first_depth_gradient = torch.autograd.grad(mixed.sum(), logprobs[0])[0]
    assert first_depth_gradient.tolist() == [1.0, 0.0, 0.0]


def test_saturated_deciders_give_finite_values_and_gradients() -> None:
    executed = [torch.arange(2), torch.arange(2)]
    logits = torch.tensor([200.0, -200.0], requires_grad=True)
    logprobs = [torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -2.0])]
    mixed = mixture_logprob(stopping_log_weights([logits], executed), logprobs, executed)
    torch.testing.assert_close(mixed, torch.tensor([-2.0, -1.0]))
    assert torch.autograd.grad(mixed.sum(), logits)[0].isfinite().all()


def test_bf16_logits_are_combined_in_fp32() -> None:
    executed, logits, logprobs = ragged([2, 4, 1], seed=3)
    coarse = [x.detach().bfloat16() for x in logits]
    log_weights = stopping_log_weights(coarse, executed)
    assert all(weight.dtype == torch.float32 for weight in log_weights)
    exact = stopping_log_weights([x.float() for x in coarse], executed)
    torch.testing.assert_close(log_weights, exact, rtol=0, atol=0)
    assert mixture_logprob(log_weights, logprobs, executed).dtype == torch.float32
