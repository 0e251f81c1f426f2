"""What a request gives back; names as in vLLM, plus depths and compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None
    """1 for the most probable token."""
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """Times are of one monotonic clock, in seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    drafted_tokens: int = 0
    agreed_tokens: int = 0
    """Drafts of next tokens that ran, and those of them that turned out right."""
    wasted_entries: int = 0
    """Entries that ran for drafts that turned out wrong."""


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    """"stop", "length", "abort" or "error"; None while running."""
    stop_reason: int | str | None
    """The token id or string that ended the output, where it was one asked for."""
    depths: list[int]
    """Iterations spent to predict each output token."""
    continue_probs: list[list[float]]
    """Per output token, the gate's probabilities after depths 1, 2, ..."""
    depth_logprobs: list[list[dict[int, Logprob]]] | None
    """Per output token and executed depth."""
    decode_flops: int | None
    """Exact, from recorded depths, of every output token but the first; None while running."""
    metrics: RequestMetrics
    error: str | None = None

    @property
    def mean_depth(self) -> float:
        return sum(self.depths) / len(self.depths) if self.depths else 0.0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    prompt_depths: list[int]
    """Iterations of each prompt token that has settled."""

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    @property
    def metrics(self) -> RequestMetrics:
        """Of the first sample."""
        return self.outputs[0].metrics


def top_logprobs(logits: Tensor, chosen: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """Per row of `logits` `[n, vocabulary]`: the chosen token and the `count` most probable, best first."""
    logprobs = logits.float().log_softmax(-1)
    index = torch.tensor(chosen, device=logits.device)[:, None]
    own = logprobs.gather(-1, index)
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    best, tokens = logprobs.topk(count, dim=-1)
    rows = []
    for token, value, rank, values, names in zip(
        chosen, own.squeeze(-1).tolist(), ranks, best.tolist(), tokens.tolist(), strict=True
    ):
        row = {token: Logprob(value, rank)}
        row.update({name: Logprob(score, at) for at, (name, score) in enumerate(zip(names, values, strict=True), 1)})
        rows.append(row)
    return rows
