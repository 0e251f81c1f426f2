"""Training FLOPs: recorded counts against an enumeration of packed documents, and the expected form against both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tah2.compute import TrainCounts, per_call, train_flops, train_flops_recorded
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.kinds import kind_of
from tah2.visibility import DUO_CAUSAL, RULES, Entries, Rule, dense_mask

TINY = BackboneConfig("qwen3", 11, 8, 10, 5, 3, 1, 4)
M = 4


def packed(documents: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Document, position and executed depth of every token; document names need not be ordered."""
    rows = [(7 - n, t, depth) for n, depths in enumerate(documents) for t, depth in enumerate(depths)]
    document, position, executed = torch.tensor(rows).T
    return document, position, executed


def queries_see(rule: Rule, documents: list[list[int]], chosen: Tensor, depth: int, lookahead: bool) -> int:
    """Query-key pairs of the chosen tokens at `depth`, from the dense mask over every entry of the pass."""
    document, position, executed = packed(documents)
    past = [
        Entries.of(document[alive], position[alive], m, executed[alive])
        for m in range(1, M + 1)
        if (alive := executed >= m).any()
    ]
    query = Entries.of(document[chosen], position[chosen], depth, lookahead=lookahead)
    keys = Entries.cat([*past, query] if lookahead else past)
    return int(dense_mask(rule, query, keys).sum())


depths = st.lists(st.lists(st.integers(1, M), min_size=1, max_size=5), min_size=1, max_size=3)


@given(st.sampled_from(sorted(RULES)), depths)
@settings(deadline=None, max_examples=60)
def test_counts_are_the_enumeration_of_every_query_and_key(name: str, documents: list[list[int]]):
    rule = RULES[name]
    document, position, executed = packed(documents)
    counts = TrainCounts.of(rule, document, executed, M)
    assert counts.once == int((position + 1).sum())
    for m in range(1, M + 1):
        ran = executed >= m
        assert counts.tokens[m - 1] == int(ran.sum())
        assert counts.pairs[m - 1] == queries_see(rule, documents, ran, m, lookahead=False)
    for m in range(1, M):
        stopped = executed == m
        assert counts.lookahead_tokens_actual[m - 1] == int(stopped.sum())
        assert counts.lookahead_pairs_actual[m - 1] == queries_see(rule, documents, stopped, m + 1, lookahead=True)


@given(depths)
@settings(deadline=None, max_examples=40)
def test_the_papers_lookahead_counts_each_query_as_if_its_token_continued(documents: list[list[int]]):
    document, _, executed = packed(documents)
    counts = TrainCounts.of(DUO_CAUSAL, document, executed, M)
    for m in range(1, M):
        pairs = sum(
            sum(min(earlier, m + 1) for earlier in own[:t]) + m + 1
            for own in documents
            for t, depth in enumerate(own)
            if depth >= m
        )
        assert counts.lookahead_pairs_paper[m - 1] == pairs
        assert counts.lookahead_tokens_paper[m - 1] == counts.tokens[m - 1]


@given(depths, depths)
@settings(deadline=None, max_examples=20)
def test_counts_of_two_batches_add_up_to_those_of_their_union(one: list[list[int]], two: list[list[int]]):
    def count(documents: list[list[int]]) -> TrainCounts:
        document, _, executed = packed(documents)
        return TrainCounts.of(DUO_CAUSAL, document, executed, M)

    assert TrainCounts.zero(M) + count(one) + count(two) == count([*one, *two])


def test_only_supervised_stopped_tokens_look_ahead():
    document, executed = torch.zeros(4, dtype=torch.long), torch.tensor([1, 2, 1, 1])
    supervised = torch.tensor([False, True, True, False])
    counts = TrainCounts.of(DUO_CAUSAL, document, executed, 2, supervised)
    assert counts.lookahead_tokens_actual == (1,)
    assert counts.lookahead_pairs_actual == (1 + 2 + 2,)
    assert counts.lookahead_tokens_paper == (4,)


def test_counts_of_different_ceilings_do_not_add():
    with pytest.raises(ValueError, match="ceilings 2 and 3"):
        TrainCounts.zero(2) + TrainCounts.zero(3)


@pytest.mark.parametrize("kind", ["standard", "tah2-fixed", "ouro", "ouro-adaptive", "huginn"])
def test_the_expected_form_is_exact_where_every_token_runs_to_the_ceiling(kind: str):
    loop = LoopConfig(kind, 3)
    row = kind_of(loop)
    ceiling = row.ceiling(loop)
    document = torch.tensor([0] * 5 + [1] * 8)
    counts = TrainCounts.of(row.rule, document, torch.full((13,), ceiling), ceiling)
    recorded = train_flops_recorded(TINY, loop, counts)
    planned = train_flops(TINY, loop, [], counts.once / 13, 13)
    assert planned.total_paper == pytest.approx(recorded.total_paper, rel=1e-12)
    assert recorded.label_paper == recorded.label_actual == planned.label_paper == planned.label_actual == 0


def test_the_expected_form_is_the_expectation_of_evenly_spread_depths():
    loop, chances = LoopConfig("tah2", 3), torch.tensor([0.5, 0.3, 0.2])
    executed = torch.multinomial(chances, 6000, replacement=True, generator=torch.Generator().manual_seed(0)) + 1
    document = torch.arange(6000) // 1500
    counts = TrainCounts.of(DUO_CAUSAL, document, executed, 3)
    recorded = train_flops_recorded(TINY, loop, counts)
    planned = train_flops(TINY, loop, [0.5, 0.2], 750.5, 6000)
    assert planned.forward_backward == pytest.approx(recorded.forward_backward, rel=0.02)
    assert planned.label_paper == pytest.approx(recorded.label_paper, rel=0.02)
    assert planned.label_actual == pytest.approx(recorded.label_actual, rel=0.02)


def test_recorded_flops_spell_out_the_papers_sums():
    loop = LoopConfig("tah2", 3)
    price = per_call(TINY, loop)
    counts = TrainCounts((10, 6, 2), (100, 90, 40), 100, (10, 6), (150, 120), (4, 4), (70, 80))
    flops = train_flops_recorded(TINY, loop, counts)
    forward = 18 * (price.backbone + price.head) + price.attention_per_key * 230 + 8 * price.reentry + 16 * price.gate
    again = price.reentry + price.backbone + price.head
    assert flops.forward_backward == 3 * forward
    assert flops.label_paper == 16 * again + price.attention_per_key * 270
    assert flops.label_actual == 8 * again + price.attention_per_key * 150
    assert flops.total_actual == flops.forward_backward + flops.label_actual


def test_in_training_a_whole_stack_loop_reads_the_head_at_every_depth_and_a_middle_loop_once():
    for kind, heads in (("ouro", 3), ("huginn", 1)):
        loop = LoopConfig(kind, 3)
        wide = BackboneConfig("qwen3", 12, 8, 10, 5, 3, 1, 4)
        difference = train_flops(wide, loop, [], 9, 1).total_paper - train_flops(TINY, loop, [], 9, 1).total_paper
        assert difference == 3 * heads * 2 * TINY.hidden_size


def test_training_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="positive"):
        train_flops(TINY, LoopConfig("ouro"), [], 9, 0)
    with pytest.raises(ConfigError, match="leave the continue fractions out"):
        train_flops(TINY, LoopConfig("ouro-adaptive"), [0.5], 9, 1)
