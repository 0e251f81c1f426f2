"""From mixed distributions to tokens: penalties, filters, and Gumbel-max with counter noise.

The noise of token v at position p of a request is a function of (seed, p, v) alone. A sample is the argmax of
scaled log-probability plus noise, so neither batching nor scheduling, preemption or speculation can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tah2.engine.kernels import Row, gather, largest
from tah2.engine.params import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


@dataclass(frozen=True)
class Draw:
    """One row to sample."""

    params: SamplingParams
    seed: int
    position: int
    """Of the token to be drawn, counted over prompt and output."""
    prompt: Sequence[int]
    output: Sequence[int]
    """Output tokens before this one, drafts included."""
    forbidden: Sequence[int] = ()
    """Tokens that may not come yet (end-of-sequence before `min_tokens`)."""
    allowed: Tensor | None = None
    """bool `[vocabulary]`: what a constraint lets pass."""


def sample_rows(rows: Sequence[Row], draws: Sequence[Draw], mixture: bool) -> list[int]:
    """As `sample`, from rows where they lie: those that only ask for the largest are not copied."""
    tables: dict[int, list[int]] = {}
    others: list[int] = []
    for i, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        plain = draw.params.greedy and not _is_adjusted(draw)
        (tables.setdefault(id(row.table), []) if plain else others).append(i)
    tokens = [0] * len(rows)
    for group in tables.values():
        table, at = rows[group[0]].table, [rows[i].at for i in group]
        chosen = None if at == list(range(len(table))) else torch.tensor(at, device=table.device)
        for i, token in zip(group, largest(table, chosen).tolist(), strict=True):
            tokens[i] = token
    if others:
        drawn = sample(gather([rows[i] for i in others]), [draws[i] for i in others], mixture)
        for i, token in zip(others, drawn, strict=True):
            tokens[i] = token
    return tokens


def sample(mixed: Tensor, draws: Sequence[Draw], mixture: bool) -> list[int]:
    """mixed fp32 `[n, vocabulary]` -> one token per row; `mixture`: see `adjusted`."""
    scores = adjusted(mixed, draws, mixture)
    if all(draw.params.greedy for draw in draws):
        return largest(scores).tolist()
    tokens = torch.zeros(len(draws), dtype=torch.long, device=scores.device)
    greedy = [row for row, draw in enumerate(draws) if draw.params.greedy]
    if greedy:
        tokens[greedy] = largest(scores[greedy])
    for (top_k, has_top_p, has_min_p), rows in _alike(draws, scores.shape[1]).items():
        chosen = [draws[row].params for row in rows]
        scaled = scores[rows] / _column([params.temperature for params in chosen], scores)
        if has_min_p:
            floor = scaled.amax(-1, keepdim=True) + _column([params.min_p for params in chosen], scores).log()
            scaled = scaled.masked_fill(scaled < floor, float("-inf"))
        candidates = None
        if top_k or has_top_p:
            scaled, candidates = scaled.topk(top_k) if top_k else scaled.sort(dim=-1, descending=True)
        if has_top_p:
            probabilities = scaled.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            scaled = scaled.masked_fill(before >= _column([params.top_p for params in chosen], scores), float("-inf"))
        keys = torch.tensor([noise_key(draws[row].seed, draws[row].position) for row in rows], device=scores.device)
        ids = torch.arange(scores.shape[1], device=scores.device)[None] if candidates is None else candidates
        best = (scaled + gumbel(keys, ids)).argmax(-1, keepdim=True)
        tokens[rows] = best.squeeze(-1) if candidates is None else candidates.gather(-1, best).squeeze(-1)
    return tokens.tolist()


def _alike(draws: Sequence[Draw], vocabulary: int) -> dict[tuple[int, bool, bool], list[int]]:
    """Sampled rows whose filters are the same operations: what a row goes through never depends on its neighbours."""
    groups: dict[tuple[int, bool, bool], list[int]] = {}
    for row, draw in enumerate(draws):
        params = draw.params
        if not params.greedy:
            top_k = params.top_k if 0 < params.top_k < vocabulary else 0
            groups.setdefault((top_k, params.top_p < 1, params.min_p > 0), []).append(row)
    return groups


def adjusted(mixed: Tensor, draws: Sequence[Draw], mixture: bool) -> Tensor:
    """Bias, penalties and masks, in that order; the input is left as it is.

    A repetition penalty divides positive scores and multiplies negative ones, so it needs one scale for all tokens:
    the logits where one depth speaks, log-probabilities where depths are mixed (`mixture`).
    """
    if not any(_is_adjusted(draw) for draw in draws):
        return mixed
    scores = mixed.clone()
    for row, draw in zip(scores, draws, strict=True):
        params = draw.params
        if mixture and params.repetition_penalty != 1:
            row.copy_(row.log_softmax(-1))
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=row.device)
            row[tokens] += torch.tensor(list(params.logit_bias.values()), device=row.device)
        _penalise(row, draw)
        if params.allowed_token_ids is not None:
            allowed = torch.zeros_like(row, dtype=torch.bool)
            allowed[params.allowed_token_ids] = True
            row.masked_fill_(~allowed, float("-inf"))
        if draw.allowed is not None:
            row.masked_fill_(~draw.allowed.to(row.device), float("-inf"))
        if draw.forbidden:
            row[list(draw.forbidden)] = float("-inf")
    return scores


def _is_adjusted(draw: Draw) -> bool:
    params = draw.params
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    restricted = params.logit_bias or params.allowed_token_ids is not None or draw.allowed is not None
    return bool(penalised or restricted or draw.forbidden)


def _penalise(row: Tensor, draw: Draw) -> None:
    params = draw.params
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.asarray([*draw.prompt, *draw.output], dtype=np.int64))).to(row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and draw.output:
        tokens, counts = np.unique(np.asarray(draw.output, dtype=np.int64), return_counts=True)
        penalty = params.frequency_penalty * torch.from_numpy(counts).float() + params.presence_penalty
        row[torch.from_numpy(tokens).to(row.device)] -= penalty.to(row.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def noise_key(seed: int, position: int) -> int:
    """A signed 64-bit number that stands for (seed, position)."""
    return _signed(_mix(_mix(seed) + position * _GOLDEN))


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of one request; the first keeps the request's own."""
    return seed if index == 0 else _mix(_mix(seed ^ _GOLDEN) + index) >> 1


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 `[n, k]`, of keys `[n]` and token ids `[n, k]` or `[1, k]`."""
    z = (tokens + 1) * _signed(_GOLDEN) + keys[:, None]  # two's complement arithmetic wraps as the counter wants
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    z = z ^ _shifted(z, 31)
    uniform = (_shifted(z, 11).double() + 0.5) * 2.0**-53
    return (-(-uniform.log()).log()).float()


def _shifted(z: Tensor, by: int) -> Tensor:
    """Right shift of the bits as an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z
