"""What is read from rows of logits and made of them: the largest, the most probable, the mixture of depths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tah2.engine import kernels
from tah2.engine.kernels import Row
from tah2.engine.params import SamplingParams
from tah2.engine.sampler import Draw, sample, sample_rows


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "width", "top_k"), [(1, 1, 1), (3, 7, 7), (2, 300, 5), (2, 1003, 64), (1, 5000, 576)])
def test_the_most_probable_tokens_are_those_of_stock_pytorch(compiled: None, rows: int, width: int, top_k: int):
    logits = 5 * random(rows, width)
    tokens, probabilities, log_total = kernels.most_probable(logits, top_k)
    expected = logits.softmax(-1).topk(top_k, dim=-1)
    assert torch.equal(tokens, expected.indices)
    assert torch.allclose(probabilities, expected.values, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(log_total, logits.logsumexp(-1))
    (last,) = kernels.most_probable(logits, top_k, torch.tensor([rows - 1])).tokens
    assert torch.equal(last, tokens[-1])


def test_without_kernels_the_most_probable_tokens_are_the_same(compiled: None):
    logits = 5 * random(3, 300)
    for made, expected in zip(
        kernels.most_probable(logits, 7), kernels.reference_most_probable(logits, 7), strict=True
    ):
        torch.testing.assert_close(made, expected)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, -float("inf")]), min_size=1, max_size=600), st.data())
def test_of_equally_probable_tokens_the_first_ones_are_taken(row: list[float], data: st.DataObject):
    if not kernels.available():
        pytest.skip("no C++ compiler here")
    logits = torch.tensor([[3.0, *row]])
    top_k = data.draw(st.integers(1, logits.shape[1]))
    tokens, probabilities, _ = kernels.most_probable(logits, top_k)
    order = logits.sort(descending=True, stable=True)
    assert torch.equal(tokens, order.indices[:, :top_k])
    assert torch.allclose(probabilities, logits.softmax(-1).gather(1, tokens), rtol=1e-5)


@pytest.mark.parametrize("width", [144, 400])
def test_selection_survives_what_is_not_a_number(compiled: None, width: int):
    logits = torch.full((1, width), float("nan"))
    tokens = kernels.most_probable(logits, 100).tokens
    assert len(set(tokens[0].tolist())) == 100
    assert 0 <= int(kernels.largest(logits)) < width


def test_the_most_probable_of_a_nearly_flat_row(compiled: None):
    logits = torch.zeros(1, 60_000)
    logits[0, ::7] = 1e-3 * torch.arange(len(logits[0, ::7]))
    tokens = kernels.most_probable(logits, 40).tokens
    assert torch.equal(tokens, logits.topk(40).indices)


@pytest.mark.parametrize("width", [1, 7, 64, 1003, 5000])
def test_the_largest_is_found_in_any_rows(way: str, width: int):
    logits = 5 * random(4, width)
    assert torch.equal(kernels.largest(logits), logits.argmax(-1))
    chosen = torch.tensor([2, 0, 2])
    assert torch.equal(kernels.largest(logits, chosen), logits[chosen].argmax(-1))
    assert kernels.largest(logits[:0]).shape == (0,)


def test_the_first_of_equal_maxima_wins(way: str):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0] * 200, [-float("inf")] * 800])
    assert kernels.largest(logits).tolist() == [1, 0]


@pytest.mark.parametrize("width", [1, 5, 16, 300, 1003])
@pytest.mark.parametrize("spread", [0.1, 5.0, 60.0])
def test_a_mixture_in_one_writing_equals_its_plain_twin(compiled: None, width: int, spread: float):
    logits, shares = spread * random(4, width), (spread * random(3, width, seed=1)).log_softmax(-1)
    before, after = random(3, seed=2).abs().neg(), random(3, seed=3)
    own, earlier = [Row(logits, at) for at in (3, 0, 2)], [Row(shares, 1), Row(shares, 2, -1.5), Row(shares, 0, 0.25)]
    picked = logits[[3, 0, 2]]
    for found, stacked in ((None, None), (earlier, kernels.gather(earlier))):
        for added in (None, after):
            made = kernels.mix(own, found, before, added)
            torch.testing.assert_close(made, kernels.reference_mix(picked, stacked, before, added))


def test_a_mixture_keeps_what_is_impossible(compiled: None):
    low = -float("inf")
    logits, share = torch.tensor([[0.0, low, 1.0, low]]), torch.tensor([[low, low, -1.0, -2.0]])
    zero = torch.zeros(1)
    made = kernels.mix([Row(logits, 0)], [Row(share, 0)], zero)
    assert made[0].isinf().tolist() == [False, True, False, False]
    torch.testing.assert_close(made, kernels.reference_mix(logits, share, zero))


def test_rows_of_several_tables_are_sampled_where_they_lie(way: str):
    tables = [3 * random(4, 50, seed=seed) for seed in (1, 2)]
    rows = [Row(tables[0], 2), Row(tables[1], 1), Row(tables[0], 0), Row(tables[1], 3), Row(tables[0], 3)]
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=10)
    biased = SamplingParams(temperature=0.0, logit_bias={7: 100.0})
    params = [greedy, drawn, greedy, greedy, biased]
    draws = [Draw(each, 5, at, (), ()) for at, each in enumerate(params)]
    tokens = sample_rows(rows, draws, mixture=False)
    assert tokens == sample(torch.stack([row.value for row in rows]), draws, mixture=False)
    assert tokens[4] == 7
    whole = [Row(tables[0], at) for at in range(4)]
    assert sample_rows(whole, [draws[0]] * 4, mixture=False) == tables[0].argmax(-1).tolist()
