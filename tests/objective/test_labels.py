"""Evidence, cutoffs, labels and weights against brute force over single tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tah2.config.strict import ConfigError
from tah2.objective.cutoff import Cutoff, coverage_cutoff
from tah2.objective.evidence import Evidence, Measured, collect_evidence
from tah2.objective.head import NO_TARGET
from tah2.objective.labels import (
    LABEL_SCHEMES,
    continuation_labels,
    first_depth_mismatch,
    iteration_gain,
    label_scheme,
    top1_mismatch,
    uniform,
    weight_scheme,
)

coarse_gains = st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), max_size=20)
"""Multiples of 1/8: sums are exact and ties are frequent."""


def cutoff_by_hand(gains: list[float], coverage: float) -> Cutoff:
    ranked = sorted((gain for gain in gains if gain > 0), reverse=True)
    for taken in range(1, len(ranked) + 1):
        if sum(ranked[:taken]) >= coverage * sum(ranked):
            return Cutoff(ranked[taken - 1], True)
    return Cutoff(0.0, False)


@settings(deadline=None)
@given(coarse_gains, st.sampled_from([0.01, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]))
def test_cutoff_is_the_first_gain_that_reaches_the_coverage(gains: list[float], coverage: float) -> None:
    assert coverage_cutoff(torch.tensor(gains), coverage) == cutoff_by_hand(gains, coverage)


@given(st.permutations([0.5, 0.5, 0.5, 0.25, 2.0, -1.0, 0.0]))
def test_cutoff_does_not_depend_on_order(gains: list[float]) -> None:
    assert coverage_cutoff(torch.tensor(gains), 0.6) == Cutoff(0.5, True)


def test_full_coverage_keeps_a_gain_too_small_to_change_the_sum() -> None:
    assert coverage_cutoff(torch.tensor([1e30, 1e-30]), 1.0).value == torch.tensor(1e-30).item()


@pytest.mark.parametrize("gains", [[], [0.0], [-1.0, -0.5]])
def test_no_positive_gain_gives_cutoff_zero(gains: list[float]) -> None:
    assert coverage_cutoff(torch.tensor(gains), 0.99) == Cutoff(0.0, False)


@pytest.mark.parametrize("coverage", [0.0, -0.1, 1.1])
def test_coverage_outside_its_range_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        coverage_cutoff(torch.tensor([1.0]), coverage)


def random_evidence(seed: int, tokens: int = 12, depths: int = 3) -> list[Evidence]:
    """Nested subsets of tokens in shuffled order, with coarse losses so that ties occur."""
    draw = torch.Generator().manual_seed(seed)
    losses = torch.randint(0, 9, (depths + 1, tokens), generator=draw) / 4
    correct = torch.rand(depths, tokens, generator=draw) < 0.5
    members, evidence = torch.randperm(tokens, generator=draw)[: tokens - 2], []
    for m in range(depths):
        row = torch.arange(len(members))
        evidence.append(Evidence(members, row, losses[m][members], losses[m + 1][members], correct[m][members]))
        keep = members[torch.rand(len(members), generator=draw) < 0.7]
        members = keep[torch.randperm(len(keep), generator=draw)]
    return evidence


def labels_by_hand(evidence: list[Evidence], scheme: str, coverage: float) -> list[dict[int, tuple[bool, float]]]:
    """token -> (continue label, cost-sensitive weight) per depth, one token at a time."""
    told_to_stop: set[int] = set()
    first_correct = dict(zip(evidence[0].token.tolist(), evidence[0].top1_correct.tolist(), strict=True))
    tables = []
    for depth in evidence:
        tokens, correct = depth.token.tolist(), depth.top1_correct.tolist()
        gain = dict(zip(tokens, (depth.loss - depth.next_loss).tolist(), strict=True))
        cut = cutoff_by_hand([gain[t] for t in tokens if t not in told_to_stop], coverage)
        table = {}
        for token, right in zip(tokens, correct, strict=True):
            wants = {
                "iteration-gain": cut.any_positive and gain[token] >= cut.value,
                "top1-mismatch": not right,
                "first-depth-mismatch": not first_correct[token],
            }[scheme]
            inherited = token in told_to_stop
            weight = 1e-6 if inherited else min(max(abs(gain[token] - cut.value), 1e-6), 1.0)
            table[token] = (wants and not inherited, weight)
        told_to_stop |= {token for token, (label, _) in table.items() if not label}
        tables.append(table)
    return tables


@settings(deadline=None)
@given(st.integers(0, 9999), st.sampled_from(sorted(LABEL_SCHEMES)), st.sampled_from([0.5, 0.9, 1.0]))
def test_labels_and_weights_equal_those_made_token_by_token(seed: int, scheme: str, coverage: float) -> None:
    evidence = random_evidence(seed)
    labelled = continuation_labels(evidence, 12, coverage=coverage, labels=label_scheme(scheme))
    for depth, mine, table in zip(evidence, labelled, labels_by_hand(evidence, scheme, coverage), strict=True):
        assert mine.continues.tolist() == [table[t][0] for t in depth.token.tolist()]
        torch.testing.assert_close(mine.weight, torch.tensor([table[t][1] for t in depth.token.tolist()]))


def single_depth(gains: list[float], token: list[int] | None = None) -> Evidence:
    loss = torch.tensor(gains)
    index = torch.arange(len(gains)) if token is None else torch.tensor(token)
    return Evidence(index, torch.arange(len(gains)), loss, torch.zeros(len(gains)), torch.ones(len(gains)) > 0)


def test_a_stop_label_is_inherited_however_large_the_later_gain() -> None:
    first, second = single_depth([1.0, -1.0]), single_depth([0.5, 9.0])
    labels = continuation_labels([first, second], 2)
    assert [depth.continues.tolist() for depth in labels] == [[True, False], [True, False]]
    assert labels[1].cutoff == Cutoff(0.5, True)  # the gain of 9 belongs to a token already told to stop
    assert labels[1].weight[1].item() == pytest.approx(1e-6)


def test_without_a_positive_gain_nobody_continues_at_this_and_later_depths() -> None:
    first, second = single_depth([0.0, -0.25]), single_depth([3.0, 3.0])
    labels = continuation_labels([first, second], 2)
    assert not any(depth.continues.any() for depth in labels)
    torch.testing.assert_close(labels[0].weight, torch.tensor([1e-6, 0.25]))
    assert labels[1].cutoff == Cutoff(0.0, False)


def test_gains_tied_with_the_cutoff_all_continue() -> None:
    (labels,) = continuation_labels([single_depth([4.0, 1.0, 1.0, 1.0, 0.5])], 5, coverage=0.6)
    assert labels.cutoff.value == 1.0
    assert labels.continues.tolist() == [True, True, True, True, False]


def test_weights_are_clipped_at_both_ends() -> None:
    (labels,) = continuation_labels([single_depth([0.5, 100.0, -100.0, 0.5])], 4, coverage=1.0)
    torch.testing.assert_close(labels.weight, torch.tensor([1e-6, 1.0, 1.0, 1e-6]))


def test_uniform_weights_are_one_even_for_inherited_stops() -> None:
    labels = continuation_labels([single_depth([1.0, -1.0]), single_depth([1.0, 2.0])], 2, weights=uniform)
    assert [depth.weight.tolist() for depth in labels] == [[1.0, 1.0], [1.0, 1.0]]


def test_labels_are_constants() -> None:
    loss = torch.tensor([1.0, 2.0], requires_grad=True)
    depth = Evidence(torch.arange(2), torch.arange(2), loss, torch.zeros(2), torch.ones(2) > 0)
    (labels,) = continuation_labels([depth], 2)
    assert not labels.weight.requires_grad
    assert not labels.continues.requires_grad


def test_model_without_loops_has_no_labels() -> None:
    assert continuation_labels([], 3) == []


def test_depths_that_nobody_executes_are_labelled_empty() -> None:
    labels = continuation_labels([single_depth([1.0]), single_depth([])], 1)
    assert [len(depth.continues) for depth in labels] == [1, 0]


def test_schemes_are_found_by_name_or_refused_with_a_suggestion() -> None:
    assert label_scheme("iteration-gain") is iteration_gain
    assert label_scheme("top1-mismatch") is top1_mismatch
    assert label_scheme("first-depth-mismatch") is first_depth_mismatch
    with pytest.raises(ConfigError, match="did you mean 'top1-mismatch'"):
        label_scheme("top-1-mismatch")
    with pytest.raises(ConfigError, match="did you mean 'cost-sensitive'"):
        weight_scheme("cost_sensitive")


def measured(token: list[int], loss: list[float], top: list[int]) -> Measured:
    return Measured(torch.tensor(token, dtype=torch.long), -torch.tensor(loss), torch.tensor(top, dtype=torch.long))


def test_evidence_joins_executed_and_lookahead_losses_of_supervised_tokens() -> None:
    targets = torch.tensor([NO_TARGET, 7, 8, 9])
    depth_1 = measured([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], [5, 7, 0, 9])
    depth_2 = measured([3, 0], [2.5, 0.0], [0, 0])  # token 3 continued; so did the prompt token 0
    probe_1 = measured([2, 1], [0.5, 1.5], [0, 0])  # tokens 1 and 2 stopped
    depth_3 = measured([], [], [])
    probe_2 = measured([3], [2.0], [9])
    first, second = collect_evidence([depth_1, depth_2, depth_3], [probe_1, probe_2], targets)
    assert (first.token.tolist(), first.row.tolist()) == ([1, 2, 3], [1, 2, 3])
    assert first.gain.tolist() == [-0.5, 1.5, 0.5]
    assert first.top1_correct.tolist() == [True, False, True]
    assert (second.token.tolist(), second.row.tolist()) == ([3], [0])
    assert second.gain.tolist() == [0.5]


def test_evidence_shows_an_unmeasured_next_loss_as_nan_and_wants_all_lookaheads() -> None:
    depth_1, empty = measured([0], [1.0], [0]), measured([], [], [])
    (evidence,) = collect_evidence([depth_1, empty], [empty], torch.tensor([3]))
    assert math.isnan(evidence.gain.item())
    with pytest.raises(ValueError, match="2 depths need 1 lookaheads"):
        collect_evidence([depth_1, empty], [], torch.tensor([3]))


def test_evidence_is_detached() -> None:
    logprob: Tensor = torch.tensor([-1.0], requires_grad=True)
    here = Measured(torch.tensor([0]), logprob, torch.tensor([0]))
    (evidence,) = collect_evidence([here, here], [measured([], [], [])], torch.tensor([0]))
    assert not evidence.gain.requires_grad
