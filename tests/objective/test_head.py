"""The chunked LM head agrees with all logits at once, and never holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tah2.objective import head
from tah2.objective.head import NO_TARGET, default_chunk_rows, largest_of, nll_sum, read_head, read_head_reference

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def make(rows: int, width: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """hidden, weight (both requiring grad), targets with some absent, positive token weights."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=draw).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(vocabulary, width, generator=draw)).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=draw)
    targets[torch.rand(rows, generator=draw) < 0.4] = NO_TARGET
    return hidden, weight, targets, torch.rand(rows, generator=draw)


def nll_by_autograd(hidden: Tensor, weight: Tensor, targets: Tensor, token_weight: Tensor) -> Tensor:
    return -(read_head_reference(hidden, weight, targets).target_logprob * token_weight).sum()


shapes = st.tuples(st.integers(0, 13), st.integers(1, 6), st.integers(2, 19), st.integers(0, 99), st.integers(1, 20))


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(1, 5))
def test_readings_and_gradients_equal_those_of_full_logits(shape: tuple[int, ...], top_k: int) -> None:
    rows, width, vocabulary, seed, chunk_rows = shape
    top_k = min(top_k, vocabulary)
    hidden, weight, targets, upstream = make(rows, width, vocabulary, seed)
    reading = read_head(hidden, weight, targets, top_k=top_k, chunk_rows=chunk_rows)
    truth = read_head_reference(hidden, weight, targets, top_k=top_k)
    for mine, true in zip(reading, truth, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)
    mine_grads = torch.autograd.grad((reading.target_logprob * upstream).sum(), (hidden, weight))
    true_grads = torch.autograd.grad((truth.target_logprob * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(mine_grads, true_grads, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(shapes)
def test_nll_sum_equals_autograd_through_full_logits(shape: tuple[int, ...]) -> None:
    rows, width, vocabulary, seed, chunk_rows = shape
    hidden, weight, targets, token_weight = make(rows, width, vocabulary, seed)
    mine = nll_sum(hidden, weight, targets, token_weight, chunk_rows=chunk_rows)
    true = nll_by_autograd(hidden, weight, targets, token_weight)
    torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)
    mine_grads = torch.autograd.grad(3 * mine, (hidden, weight))
    true_grads = torch.autograd.grad(3 * true, (hidden, weight))
    torch.testing.assert_close(mine_grads, true_grads, rtol=1e-5, atol=2e-5)


def test_gradcheck_in_double_precision() -> None:
    hidden, weight, targets, token_weight = make(5, 3, 7, seed=1, dtype=torch.float64)
    read = lambda h, w: read_head(h, w, targets, top_k=2, chunk_rows=2).target_logprob
    assert torch.autograd.gradcheck(read, (hidden, weight))
    total = lambda h, w: nll_sum(h, w, targets, token_weight.double(), chunk_rows=2)
    assert torch.autograd.gradcheck(total, (hidden, weight))


def test_without_top_k_only_supervised_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_KEPT_BYTES", {})
    hidden, weight, targets, _ = make(9, 4, 11, seed=2)
    rows = MatrixProductRows()
    with rows:
        reading = read_head(hidden, weight, targets, chunk_rows=2)
        reading.target_logprob.sum().backward()
    supervised = targets != NO_TARGET
    assert int(supervised.sum()) == 4
    assert rows.read == 4 + 4  # forward, and in backward again
    assert torch.equal(reading.top_token == -1, ~supervised)
    assert not reading.logsumexp[~supervised].any()
    assert reading.logsumexp[supervised].all()


def test_with_top_k_the_backward_recomputes_only_supervised_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_KEPT_BYTES", {})
    hidden, weight, targets, _ = make(9, 4, 11, seed=2)
    rows = MatrixProductRows()
    with rows:
        read_head(hidden, weight, targets, top_k=3, chunk_rows=3).target_logprob.sum().backward()
    assert rows.read == 9 + int((targets != NO_TARGET).sum())


@pytest.mark.parametrize("room", [0, 60, 130, 1 << 20])
def test_kept_log_probabilities_save_products_and_change_no_gradient(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    hidden, weight, targets, token_weight = make(9, 4, 11, seed=2)
    monkeypatch.setattr(head, "_kept_bytes", lambda weight: room)
    rows = MatrixProductRows()
    with rows:
        loss = -(token_weight * read_head(hidden, weight, targets, top_k=3, chunk_rows=3).target_logprob).sum()
        mine = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        twice = torch.autograd.grad(loss, (hidden, weight))
    true = torch.autograd.grad(nll_by_autograd(hidden, weight, targets, token_weight), (hidden, weight))
    torch.testing.assert_close(mine, true, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(twice, mine, rtol=0, atol=0)
    again = rows.read - 9
    assert again == 0 if room == 1 << 20 else 0 < again <= 8


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for: sizes that depend on values."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default)
        return function(*args, **(kwargs or {}))


def test_without_room_to_keep_anything_the_chunks_of_a_gpu_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_KEPT_BYTES", {})
    hidden, weight, targets, _ = make(9, 4, 11, seed=2)
    with Waits() as waits:
        read_head(hidden, weight, targets, top_k=3, chunk_rows=3)
    assert waits.count == 0


def test_without_targets_every_row_is_read() -> None:
    hidden, weight, _, _ = make(6, 4, 11, seed=3)
    reading = read_head(hidden, weight, None, chunk_rows=4)
    assert torch.equal(reading.top_token, (hidden @ weight.T).argmax(-1))
    torch.testing.assert_close(reading.logsumexp, (hidden @ weight.T).logsumexp(-1))
    assert not reading.target_logprob.any()


def test_equal_logits_give_the_lowest_id() -> None:
    weight = torch.tensor([[0.0], [1.0], [1.0], [0.5]])
    assert read_head(torch.ones(3, 1), weight, None, top_k=2).top_token.tolist() == [1, 1, 1]


def test_readings_other_than_the_target_carry_no_gradient() -> None:
    hidden, weight, targets, _ = make(5, 4, 11, seed=4)
    reading = read_head(hidden, weight, targets, top_k=2)
    assert [value.requires_grad for value in reading] == [True, False, False, False, False]


def test_gradients_accumulate_over_several_uses_of_one_tied_weight() -> None:
    hidden, weight, targets, token_weight = make(8, 4, 11, seed=5)
    tokens = torch.arange(8)

    def loss(read: Any, total: Any) -> Tensor:
        embedded = weight[tokens] + hidden
        return total(embedded, weight, targets, token_weight) - read(embedded, 2 * weight, targets).target_logprob.sum()

    mine = torch.autograd.grad(loss(read_head, nll_sum), (hidden, weight))
    true = torch.autograd.grad(loss(read_head_reference, nll_by_autograd), (hidden, weight))
    torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_costs_no_product(frozen: str) -> None:
    hidden, weight, targets, token_weight = make(8, 4, 11, seed=6)
    still, moving = (hidden, weight) if frozen == "hidden" else (weight, hidden)
    still.requires_grad_(False)
    count = MatrixProductRows()
    with count:
        nll_sum(hidden, weight, targets, token_weight).backward()
        read_head(hidden, weight, targets).target_logprob.sum().backward()
    assert count.products == 2 + 2
    assert still.grad is None
    assert moving.grad is not None
    assert moving.grad.abs().sum() > 0


def test_backward_may_run_twice() -> None:
    hidden, weight, targets, token_weight = make(8, 4, 11, seed=6)
    total = nll_sum(hidden, weight, targets, token_weight)
    first = torch.autograd.grad(total, weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(total, weight)[0])
    read = read_head(hidden, weight, targets, top_k=2, chunk_rows=3).target_logprob.sum()
    first = torch.autograd.grad(read, weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(read, weight)[0])


@pytest.mark.parametrize("top_k", [0, 2])
def test_log_probabilities_that_are_kept_change_no_gradient(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, token_weight = make(9, 4, 11, seed=9)

    def gradients() -> tuple[Tensor, ...]:
        reading = read_head(hidden, weight, targets, top_k=top_k, chunk_rows=4)
        return torch.autograd.grad((reading.target_logprob * token_weight).sum(), (hidden, weight))

    kept = gradients()
    monkeypatch.setattr(head, "_KEPT_BYTES", {})
    torch.testing.assert_close(kept, gradients(), rtol=1e-6, atol=1e-6)


def test_under_no_grad_the_loss_forms_no_gradient() -> None:
    hidden, weight, targets, token_weight = make(8, 4, 11, seed=6)
    rows = MatrixProductRows()
    with rows, torch.no_grad():
        nll_sum(hidden, weight, targets, token_weight)
    assert rows.products == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operation", ["read_head", "nll_sum"])
def test_bf16_error_is_no_larger_than_that_of_the_naive_bf16_implementation(operation: str, device: str) -> None:
    inputs = make(96, 32, 50, seed=7, dtype=torch.bfloat16)
    hidden, weight, targets, token_weight = (x.detach().to(device) for x in inputs)

    def loss(read: Any, total: Any, h: Tensor, w: Tensor) -> Tensor:
        if operation == "nll_sum":
            return total(h, w, targets, token_weight)
        return -(read(h, w, targets).target_logprob * token_weight).sum()

    def value_and_grads(read: Any, total: Any, dtype: torch.dtype) -> list[Tensor]:
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        value = loss(read, total, h, w)
        assert value.dtype == torch.float32
        return [x.float() for x in (value.detach(), *torch.autograd.grad(value, (h, w)))]

    truth = value_and_grads(read_head_reference, nll_by_autograd, torch.float32)
    naive = value_and_grads(read_head_reference, nll_by_autograd, torch.bfloat16)
    chunked = lambda *inputs, **options: read_head(*inputs, chunk_rows=10, **options)
    chunked_sum = lambda *inputs: nll_sum(*inputs, chunk_rows=10)
    for mine, plain, true in zip(value_and_grads(chunked, chunked_sum, torch.bfloat16), naive, truth, strict=True):
        scale = true.abs().max()
        assert (mine - true).abs().max() <= (plain - true).abs().max() + 1e-3 * scale
        assert (mine - true).norm() <= 1.05 * (plain - true).norm() + 1e-3 * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operation", ["read_head", "nll_sum"])
def test_autocast_computes_products_in_bf16_and_keeps_fp32_gradients(operation: str, device: str) -> None:
    inputs = make(12, 8, 20, seed=8)
    hidden, weight, targets, token_weight = (x.detach().to(device) for x in inputs)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def loss(h: Tensor, w: Tensor) -> Tensor:
        if operation == "nll_sum":
            return nll_sum(h, w, targets, token_weight)
        return -(read_head(h, w, targets).target_logprob * token_weight).sum()

    with torch.autocast(device, dtype=torch.bfloat16):
        value = loss(hidden, weight)
    gradients = torch.autograd.grad(value, (hidden, weight))
    expected = loss(hidden.detach().bfloat16(), weight.detach().bfloat16())
    assert torch.equal(value.detach(), expected)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32]
    exact = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    torch.testing.assert_close(gradients, exact, rtol=0.05, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


class MatrixProductRows(TorchDispatchMode):
    """Counts rows of logits that were computed: products whose right side is the transposed weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and not args[1].is_contiguous():
            self.read += args[0].shape[0]
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_k", [0, 5])
def test_no_tensor_of_rows_by_vocabulary_ever_exists(top_k: int) -> None:
    rows, width, vocabulary, chunk_rows = 64, 4, 300, 4
    hidden, weight, targets, token_weight = make(rows, width, vocabulary, seed=9)
    watch = LargestTensor()
    with watch:
        read_head(hidden, weight, targets, top_k=top_k, chunk_rows=chunk_rows).target_logprob.sum().backward()
        nll_sum(hidden, weight, targets, token_weight, chunk_rows=chunk_rows).backward()
    assert watch.elements == vocabulary * max(width, chunk_rows)
    with watch:
        read_head_reference(hidden, weight, targets)
    assert watch.elements == rows * vocabulary


def test_default_chunk_shrinks_with_the_vocabulary() -> None:
    assert default_chunk_rows(torch.zeros(1024, 1)) == 8 * default_chunk_rows(torch.zeros(8192, 1))
    assert default_chunk_rows(torch.empty(1 << 30, 1, device="meta")) == 1


def test_misfitting_inputs_are_refused() -> None:
    hidden, weight, targets, token_weight = make(5, 3, 7, seed=1)
    with pytest.raises(ValueError, match="do not fit"):
        read_head(hidden, weight.T, targets)
    with pytest.raises(ValueError, match="one id per row"):
        read_head(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="vocabulary size 7"):
        read_head(hidden, weight, targets, top_k=8)
    with pytest.raises(ValueError, match="one value per target"):
        nll_sum(hidden, weight, targets, token_weight[1:])


@given(rows=st.integers(1, 3), columns=st.integers(1, 70), data=st.data())
def test_the_largest_values_are_those_of_a_plain_selection(rows: int, columns: int, data: st.DataObject):
    k = data.draw(st.integers(0, columns))
    x = torch.randint(-5, 5, (rows, columns), generator=torch.Generator().manual_seed(columns)).float()
    values, where = largest_of(x, k)
    assert torch.equal(values, x.topk(k, -1).values)
    assert torch.equal(x.gather(1, where), values)
    assert all(len(set(row)) == k for row in where.tolist())
