"""Parts of the engine against their definitions: slot lists, paged attention, allocator, mixture, noise, filters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tah2.compute.keys import keys_at_depths
from tah2.engine.kernels import Row, gather
from tah2.engine.mixing import carried, stopped
from tah2.engine.paged import PaddedAttention, paged_attention
from tah2.engine.params import SamplingParams
from tah2.engine.pool import PoolError, SlotAllocator
from tah2.engine.sampler import Draw, adjusted, gumbel, noise_key, sample, sample_seed
from tah2.engine.slots import Sight, SlotLists, TokenSlots
from tah2.model.kinds import Output
from tah2.visibility import RULES, slot_list


def tokens_of(depths: list[int], first: int = 0) -> TokenSlots:
    total = sum(depths)
    return TokenSlots(np.array(depths, dtype=np.int64), np.arange(first, first + total), np.arange(len(depths)))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.lists(st.integers(1, 4), max_size=12), st.data())
def test_slot_lists_are_the_rules_lists(name: str, depths: list[int], data: st.DataObject):
    """Whatever the pieces in which tokens settle; and their lengths are the visible keys of the FLOPs formula."""
    rule, lists = RULES[name], SlotLists(Sight.of(RULES[name], 4))
    cut = data.draw(st.integers(0, len(depths)))
    lists.append(tokens_of(depths[:cut]))
    lists.append(tokens_of(depths[cut:], sum(depths[:cut])))
    slot = {
        (position, j): sum(depths[:position]) + j - 1
        for position, last in enumerate(depths)
        for j in range(1, last + 1)
    }
    counts, _ = keys_at_depths(rule, torch.tensor([*depths, 4]), 4)
    for m in range(1, 5):
        assert lists.read_at(m).tolist() == [slot[key] for key in slot_list(rule, depths, m)]
        own = int(Sight.of(rule, 4).own[m].sum())
        assert len(lists.read_at(m)) + own == int(counts[-1, m - 1])


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.data())
def test_parts_of_token_slots_join_again(depths: list[int], data: st.DataObject):
    tokens, cut = tokens_of(depths), data.draw(st.integers(0, len(depths)))
    joined = TokenSlots.join([tokens.part(0, cut), tokens.part(cut, len(depths))])
    assert joined.looped.tolist() == tokens.looped.tolist()
    assert joined.depths.tolist() == depths


@pytest.mark.parametrize("lengths", [[5], [3, 3], [1, 7, 4]])
def test_padded_attention_equals_the_plain_one(lengths: list[int]):
    torch.manual_seed(0)
    query, keys, values = torch.randn(len(lengths), 4, 8), torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    slots = torch.randint(30, (sum(lengths),))
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    plain = paged_attention(query, keys, values, slots, offsets)
    torch.testing.assert_close(PaddedAttention()(query, keys, values, slots, offsets), plain, atol=1e-5, rtol=1e-5)


def test_the_allocator_notices_leaks_and_double_owners():
    allocator = SlotAllocator(5)
    taken = allocator.take(4)
    allocator.give(taken[:2])
    allocator.check(np.array(taken[2:]))
    assert allocator.free == 3
    assert len(set(allocator.take(3)) & set(taken[2:])) == 0
    for wrong in (taken[3:], [*taken, taken[0]]):
        with pytest.raises(PoolError, match="leaked or has two owners"):
            allocator.check(np.array(wrong))
    with pytest.raises(PoolError, match="are free"):
        allocator.take(1)


@pytest.mark.parametrize("output", [Output.STOPPING_MIXTURE, Output.UNIFORM_MIXTURE])
@pytest.mark.parametrize("known", [False, True])
def test_stopping_at_any_depth_gives_the_definition_of_the_mixture(output: Output, known: bool):
    torch.manual_seed(1)
    logits, chance = torch.randn(3, 2, 7), torch.rand(3, 2)
    share: list[Row] | None = None
    totals = logits[0].logsumexp(-1).tolist()
    before = torch.zeros(2)

    def own(depth: int) -> list[Row]:
        return [Row(logits[depth - 1], 0), Row(logits[depth - 1], 1)]

    for depth in (1, 2, 3):
        gate = torch.logit(chance[depth - 1])
        stop = torch.nn.functional.logsigmoid(-gate)
        mixed = logits[0]
        if share is not None:
            mixed = stopped(output, own(depth), share, torch.tensor([depth, depth]), before)
        share = carried(output, own(depth), share, before + stop, totals if known else None)
        before = before + torch.nn.functional.logsigmoid(gate)
        survival = torch.cat([torch.ones(1, 2), chance[: depth - 1].cumprod(0)])
        weights = torch.cat([survival[:-1] * (1 - chance[: depth - 1]), survival[-1:]])
        if output is Output.UNIFORM_MIXTURE:
            weights = torch.full((depth, 2), 1 / depth)
        truth = (weights[:, :, None] * logits[:depth].softmax(-1)).sum(0)
        torch.testing.assert_close(mixed.softmax(-1), truth)


def test_gathering_a_whole_table_copies_nothing():
    table, other = torch.randn(3, 4), torch.randn(1, 4)
    assert gather([Row(table, i) for i in range(3)]) is table
    assert torch.equal(gather([Row(table, 2), Row(other, 0)]), torch.stack([table[2], other[0]]))
    assert torch.equal(gather([Row(table, 1), Row(table, 0), Row(table, 2)]), table[[1, 0, 2]])


def draw(params: SamplingParams, position: int = 3, seed: int = 0, **rest: object) -> Draw:
    return Draw(params, seed, position, (1, 2), (2, 4, 4), **rest)  # type: ignore[arg-type]


def frequencies(logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> torch.Tensor:
    draws = [draw(params, position=i) for i in range(count)]
    return torch.bincount(torch.tensor(sample(logits.expand(count, -1), draws, False)), minlength=len(logits)) / count


def test_samples_follow_the_distribution():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -3.0])
    for params, truth in [
        (SamplingParams(), logits.softmax(-1)),
        (SamplingParams(temperature=0.5), (logits / 0.5).softmax(-1)),
        (SamplingParams(top_k=2), torch.tensor([0, 0, 1, 0, 1, 0]) * logits.exp()),
        (SamplingParams(top_p=0.6), torch.tensor([0, 0, 1, 0, 1, 0]) * logits.exp()),
        (SamplingParams(min_p=0.3), torch.tensor([0, 0, 1, 0, 1, 0]) * logits.exp()),
        (SamplingParams(top_k=3, top_p=0.5), torch.tensor([0, 0, 1, 0, 0, 0]) * logits.exp()),
        (SamplingParams(temperature=0.0), torch.tensor([0, 0, 1, 0, 0, 0]) * logits.exp()),
    ]:
        torch.testing.assert_close(frequencies(logits, params), truth / truth.sum(), atol=0.03, rtol=0)


def test_noise_is_a_function_of_seed_position_and_token():
    tokens = torch.arange(50_000)[None]
    noise = gumbel(torch.tensor([noise_key(1, 2), noise_key(1, 3), noise_key(2, 2)]), tokens)
    assert torch.equal(noise[:1], gumbel(torch.tensor([noise_key(1, 2)]), tokens))
    assert torch.equal(
        noise[:, 7:9], gumbel(torch.tensor([noise_key(1, 2), noise_key(1, 3), noise_key(2, 2)]), tokens[:, 7:9])
    )
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.04
    assert torch.corrcoef(noise).triu(1).abs().max() < 0.02
    assert abs(float(torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1])) < 0.02
    assert len({sample_seed(5, i) for i in range(100)}) == 100
    assert sample_seed(5, 0) == 5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 8), st.floats(0.1, 1), st.floats(0, 0.5)), min_size=2, max_size=5
    ),
    st.integers(0, 9),
)
def test_a_row_is_sampled_alike_alone_and_among_others(settings_: list[tuple[float, int, float, float]], seed: int):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(len(settings_), 30)
    draws = [
        draw(SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m), position=i, seed=seed)
        for i, (t, k, p, m) in enumerate(settings_)
    ]
    alone = [sample(logits[i : i + 1], [one], False)[0] for i, one in enumerate(draws)]
    assert sample(logits, draws, False) == alone


def test_penalties_bias_and_masks():
    logits = torch.tensor([[1.0, 2.0, -1.0, 0.5, 0.25]])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 10.0})
    out = adjusted(logits, [draw(params)], mixture=False)
    assert out.tolist() == [[1.0, 1.0, -2.0 - 0.75, 10.5, 0.125 - 1.0]]
    assert logits[0, 3] == 0.5
    mixed = adjusted(logits, [draw(SamplingParams(repetition_penalty=2.0))], mixture=True)
    torch.testing.assert_close(
        mixed, adjusted(logits.log_softmax(-1), [draw(SamplingParams(repetition_penalty=2.0))], False)
    )
    only = adjusted(logits, [draw(SamplingParams(allowed_token_ids=[2, 3]), forbidden=(3,))], mixture=False)
    assert only.isinf().tolist() == [[True, True, False, True, True]]
    assert adjusted(logits, [draw(SamplingParams())], mixture=False) is logits


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": 2},
        {"max_tokens": 0},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"stop": [""]},
        {"logprobs": -1},
        {"exit_threshold": math.nan},
        {"max_depth": 0},
        {"depth_logprobs": True},
        {"stop": "a", "detokenize": False},
    ],
)
def test_parameters_are_checked_where_they_are_made(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=r"\."):
        SamplingParams(**wrong)  # type: ignore[arg-type]
