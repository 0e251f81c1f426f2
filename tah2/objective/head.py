"""The LM head read in chunks of rows: what a loss or a decider needs of softmax(W h), never the [N, V] whole.

    l = -log q[y*],   q = softmax(W_out h)

`read_head` returns per-row readings of q, differentiable in `target_logprob`; its backward computes the
logits of each chunk again (four products in all), save those of the last chunk on CPUs, which are kept.
`nll_sum` is the linear loss -sum_t w_t log q_t[y*_t]; as its upstream gradient is one scalar, it forms the
gradient while the logits are at hand (three products).

Products run in the dtype of `hidden` (or of autocast where that is on), softmax and statistics in fp32,
and the weight's gradient is summed over chunks in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_TARGET = -100
"""The target of a row that is not supervised."""

_CHUNK_BYTES = {"cuda": 1 << 30}
_CHUNK_BYTES_ELSEWHERE = 1 << 26
_KEPT_BYTES = {"cpu": 1 << 26}
"""Log-probabilities of so many bytes (or of twice the weight's) may wait for `read_head`'s backward instead of being
computed again."""


class HeadReading(NamedTuple):
    """Readings of q per row; only `target_logprob` carries gradient. A row that was not read holds 0, 0, 0, -1, -1."""

    target_logprob: Tensor
    """fp32 `[N]`: log q[target]; 0 where there is no target."""
    logsumexp: Tensor
    """fp32 `[N]`: the log of the softmax's denominator."""
    top_probs: Tensor
    """fp32 `[N, k]`: the k largest probabilities, descending."""
    top_token: Tensor
    """long `[N]`: the most probable token; among equals the lowest id, as greedy decoding takes it."""
    top_tokens: Tensor
    """long `[N, k]`: the tokens of `top_probs`."""


def read_head(
    hidden: Tensor, weight: Tensor, targets: Tensor | None, *, top_k: int = 0, chunk_rows: int | None = None
) -> HeadReading:
    """Read softmax(weight @ hidden) at `hidden` `[N, d]`, `weight` `[V, d]`, `targets` long `[N]` or None.

    With `top_k` = 0 and targets given, rows without target are not read at all. `chunk_rows` bounds how many
    rows of logits exist at a time; by default it follows from a budget of bytes.
    """
    _check(hidden, weight, targets)
    if not 0 <= top_k <= weight.shape[0]:
        raise ValueError(f"top_k must lie between 0 and the vocabulary size {weight.shape[0]}, not {top_k}.")
    rows = None
    if targets is None:
        targets = torch.full(hidden.shape[:1], NO_TARGET, device=hidden.device)
    elif top_k == 0:
        rows = _rows_where(targets != NO_TARGET)
    compute, chunk_rows = _compute_dtype(hidden), chunk_rows or default_chunk_rows(weight)
    reading = _ReadHead.apply(hidden, weight, targets, rows, top_k, chunk_rows, compute)  # type: ignore[no-untyped-call]
    return HeadReading(*reading)


def read_head_reference(hidden: Tensor, weight: Tensor, targets: Tensor | None, *, top_k: int = 0) -> HeadReading:
    """`read_head` by way of all logits at once; the plain statement that the chunks must agree with."""
    logits = hidden @ weight.T
    logprob = logits.float().log_softmax(-1)
    targets = torch.full_like(logits[:, 0], NO_TARGET, dtype=torch.long) if targets is None else targets
    supervised = targets != NO_TARGET
    chosen = logprob.gather(1, targets.where(supervised, 0)[:, None])[:, 0]
    top_probs = logprob.detach().exp().topk(top_k, -1).values
    top_tokens = logits.detach().topk(top_k, -1).indices
    best = logits.argmax(-1)
    return HeadReading(chosen.where(supervised, 0.0), logits.float().logsumexp(-1), top_probs, best, top_tokens)


def largest_of(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row of `x` `[n, V]`, descending, and their columns, as `x.topk(k, -1)`.

    Cut a row into groups of g = sqrt(V / k): the k largest lie in the k groups whose maxima are largest, so two
    selections among V / g maxima and k g candidates replace one among V. Among equals any column may be named.
    """
    vocabulary = x.shape[1]
    size = math.isqrt(vocabulary // max(k, 1))
    if size < 2:
        return x.topk(k, -1)
    groups = vocabulary // size
    maxima = x[:, : groups * size].unflatten(1, (size, groups)).amax(1)
    chosen = maxima.topk(k, -1, sorted=False).indices
    rest = torch.arange(groups * size, vocabulary, device=x.device).expand(len(x), -1)
    candidates = torch.cat([*(chosen + groups * member for member in range(size)), rest], 1)
    values, places = x.gather(1, candidates).topk(k, -1)
    return values, candidates.gather(1, places)


def nll_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weight: Tensor, *, chunk_rows: int | None = None
) -> Tensor:
    """-sum_t token_weight[t] log q_t[targets[t]] over rows with a target: a scalar, fp32.

    Shapes: `hidden` `[N, d]`, `weight` `[V, d]`, `targets` long `[N]`, `token_weight` `[N]` (a constant).
    Divide by the number of tokens inside `token_weight`, not afterwards, to keep gradients in bf16's range.
    """
    _check(hidden, weight, targets)
    if token_weight.shape != targets.shape:
        raise ValueError(f"token_weight needs one value per target: {tuple(targets.shape)}.")
    rows = _rows_where((targets != NO_TARGET) & (token_weight != 0))
    rows = torch.arange(len(targets), device=targets.device) if rows is None else rows
    compute, chunk_rows = _compute_dtype(hidden), chunk_rows or default_chunk_rows(weight)
    form_gradient = torch.is_grad_enabled()
    return _NllSum.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, token_weight.detach(), rows, chunk_rows, compute, form_gradient
    )


def default_chunk_rows(weight: Tensor) -> int:
    """How many rows of fp32 logits over `weight` `[V, d]` fit the budget of its device."""
    budget = _CHUNK_BYTES.get(weight.device.type, _CHUNK_BYTES_ELSEWHERE)
    return max(1, budget // (4 * weight.shape[0]))


class _ReadHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor | None,
        top_k: int,
        chunk_rows: int,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        statistics = _statistics_dtype(compute)
        target_logprob = torch.zeros(len(hidden), dtype=statistics, device=hidden.device)
        logsumexp = torch.zeros_like(target_logprob)
        top_probs = torch.zeros(len(hidden), top_k, dtype=statistics, device=hidden.device)
        top_tokens = torch.full((len(hidden), top_k), -1, dtype=torch.long, device=hidden.device)
        top_token = torch.full_like(targets, -1)
        kept: list[tuple[Tensor, Tensor]] = []
        room = _kept_bytes(weight) if any(ctx.needs_input_grad[:2]) else 0
        with _without_autocast(hidden):
            cast_weight = weight.to(compute)
            for chunk in _chunks(rows, len(hidden), chunk_rows):
                logits = hidden[chunk].to(compute) @ cast_weight.T
                logprob = logits.log_softmax(-1, dtype=statistics)
                best = logits.argmax(-1, keepdim=True)
                total = logits.gather(1, best).to(statistics) - logprob.gather(1, best)
                supervised = targets[chunk, None] != NO_TARGET
                chosen = logprob.gather(1, targets[chunk, None].where(supervised, 0)).where(supervised, 0)
                target_logprob[chunk], logsumexp[chunk], top_token[chunk] = chosen[:, 0], total[:, 0], best[:, 0]
                if top_k:
                    largest, top_tokens[chunk] = largest_of(logits, top_k)
                    top_probs[chunk] = (largest.to(statistics) - total).exp()
                if room:  # counting rows would make a GPU wait
                    local = supervised[:, 0].nonzero()[:, 0]
                    size = len(local) * logprob.shape[1] * logprob.element_size()
                    if 0 < size <= room:
                        room -= size
                        kept.append((_row_numbers(chunk, hidden)[local], _taken(logprob, local)))
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk_rows, ctx.compute = chunk_rows, compute
        ctx.kept = kept  # never written to, so that backward may run twice
        ctx.mark_non_differentiable(logsumexp, top_probs, top_token, top_tokens)
        ctx.set_materialize_grads(False)
        return target_logprob, logsumexp, top_probs, top_token, top_tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 7
        hidden, weight, targets = ctx.saved_tensors
        with _without_autocast(hidden):
            gradient = _Gradient(hidden, weight, ctx.compute, *ctx.needs_input_grad[:2])
            missing = targets != NO_TARGET
            for kept, logprob in ctx.kept:
                gradient.add(kept, logprob.exp(), targets[kept], upstream[kept])
                missing[kept] = False
            again = missing.nonzero()[:, 0]
            for chunk in _chunks(None if len(again) == len(hidden) else again, len(hidden), ctx.chunk_rows):
                logits = hidden[chunk].to(ctx.compute) @ gradient.cast_weight.T
                probs = logits.softmax(-1, dtype=upstream.dtype)
                gradient.add(chunk, probs, targets[chunk], upstream[chunk])
        return *gradient.result(), None, None, None, None, None


class _NllSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weight: Tensor,
        rows: Tensor,
        chunk_rows: int,
        compute: torch.dtype,
        form_gradient: bool,
    ) -> Tensor:
        statistics = _statistics_dtype(compute)
        total = torch.zeros((), dtype=statistics, device=hidden.device)
        wanted = [form_gradient and need for need in ctx.needs_input_grad[:2]]
        with _without_autocast(hidden):
            gradient = _Gradient(hidden, weight, compute, *wanted)
            for chunk in _chunks(rows, len(hidden), chunk_rows):
                logits = hidden[chunk].to(compute) @ gradient.cast_weight.T
                logprob = logits.log_softmax(-1, dtype=statistics)
                slope = -token_weight[chunk].to(statistics)
                total += slope @ logprob.gather(1, targets[chunk, None])[:, 0]
                if any(wanted):
                    gradient.add(chunk, logprob.exp_(), targets[chunk], slope)
        ctx.save_for_backward(*gradient.result())
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient = (
            None if saved is None else (saved * upstream).to(saved.dtype) for saved in ctx.saved_tensors
        )
        return hidden_gradient, weight_gradient, None, None, None, None, None, None


class _Gradient:
    """Gradients of sum_t slope_t log q_t[target_t] with respect to `hidden` and `weight`, chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, compute: torch.dtype, of_hidden: bool, of_weight: bool) -> None:
        self._source, self._weight_dtype = hidden, weight.dtype
        self.cast_weight = weight.to(compute)
        self._of_hidden = torch.zeros_like(hidden) if of_hidden else None
        self._of_weight = torch.zeros_like(weight, dtype=_statistics_dtype(compute)) if of_weight else None

    def add(self, chunk: slice | Tensor, probs: Tensor, targets: Tensor, slope: Tensor) -> None:
        """Add one chunk; overwrites `probs` `[c, V]` with d/dlogits = slope (onehot(target) - probs)."""
        column = targets[:, None]
        slopes = probs.mul_(-slope[:, None])
        slopes.scatter_(1, column, slopes.gather(1, column) + slope[:, None])
        slopes = slopes.to(self.cast_weight.dtype)
        if self._of_hidden is not None:
            self._of_hidden[chunk] = (slopes @ self.cast_weight).to(self._of_hidden.dtype)
        if self._of_weight is not None:
            _add_product(self._of_weight, slopes.T, self._source[chunk].to(slopes.dtype))

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        return self._of_hidden, None if self._of_weight is None else self._of_weight.to(self._weight_dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the dtype of `total` whatever the dtype of the factors."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _kept_bytes(weight: Tensor) -> int:
    least = _KEPT_BYTES.get(weight.device.type, 0)
    return max(least, 2 * weight.nbytes) if least else 0


def _row_numbers(chunk: slice | Tensor, hidden: Tensor) -> Tensor:
    return torch.arange(chunk.start, chunk.stop, device=hidden.device) if isinstance(chunk, slice) else chunk


def _taken(values: Tensor, rows: Tensor) -> Tensor:
    """`values[rows]`, without a copy where that is all of them in order."""
    return values if len(rows) == len(values) else values[rows]


def _chunks(rows: Tensor | None, count: int, chunk_rows: int) -> Iterator[slice | Tensor]:
    """Cut all of `count` rows (slices), or the chosen `rows` (indices), into chunks of nearly equal length."""
    count = count if rows is None else len(rows)
    pieces = -(-count // chunk_rows)
    for piece in range(pieces):
        span = slice(piece * count // pieces, (piece + 1) * count // pieces)
        yield span if rows is None else rows[span]


def _rows_where(chosen: Tensor) -> Tensor | None:
    """Indices of the chosen rows; None when all are, so that chunks can be slices."""
    rows = chosen.nonzero()[:, 0]
    return None if len(rows) == len(chosen) else rows


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _statistics_dtype(compute: torch.dtype) -> torch.dtype:
    return torch.promote_types(compute, torch.float32)


def _without_autocast(hidden: Tensor) -> AbstractContextManager[None]:
    return torch.autocast(hidden.device.type, enabled=False)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, d] and weight [V, d] do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}.")
    if targets is not None and targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets need one id per row of hidden: {tuple(hidden.shape[:1])}, not {tuple(targets.shape)}."
        )
