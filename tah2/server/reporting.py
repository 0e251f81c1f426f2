"""Tokens, probabilities and costs of samples in the forms that clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from tah2.server.messages import Delta, PromptReport, Scored
from tah2.server.protocol.answers import (
    CachedTokens,
    ChatLogprobs,
    CompletionLogprobs,
    OutputDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tah2.server.protocol.sampling import SamplingFields
from tah2.server.tokens import Offsets, TokenTable


class Tally:
    """What the samples of one answer have cost so far."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens, self.cached_tokens = prompt_tokens, 0
        self.tokens = self.reasoning_tokens = self.passes = 0
        self.flops: int | None = 0
        self.plain_flops: int | None = 0
        self._running: dict[tuple[str, int], tuple[int, int]] = {}
        """FLOPs so far of samples that have not ended, where they are known."""

    def add(self, delta: Delta, reasoning: bool = False) -> None:
        self.tokens += len(delta.tokens)
        self.passes += sum(delta.depths)
        self.reasoning_tokens += len(delta.tokens) if reasoning else 0
        if delta.prompt is not None:
            self.cached_tokens += delta.prompt.cached
        if delta.ending is not None and self.flops is not None and self.plain_flops is not None:
            self.flops += delta.ending.decode_flops
            self.plain_flops += delta.ending.plain_flops
            self._running.pop((delta.id, delta.index), None)
        elif delta.costs is not None:
            self._running[delta.id, delta.index] = delta.costs

    def usage(self, final: bool = True) -> Usage:
        flops, plain = self.flops, self.plain_flops
        if not final:
            known = bool(self._running) and flops is not None and plain is not None
            flops = (flops or 0) + sum(cost for cost, _ in self._running.values()) if known else None
            plain = (plain or 0) + sum(cost for _, cost in self._running.values()) if known else None
        return Usage(
            self.prompt_tokens,
            self.tokens,
            self.prompt_tokens + self.tokens,
            CachedTokens(self.cached_tokens),
            OutputDetails(self.reasoning_tokens),
            round(self.passes / self.tokens, 4) if self.tokens else None,
            flops,
            plain,
        )

    @property
    def notes(self) -> dict[str, Any]:
        """For the log."""
        mean = round(self.passes / self.tokens, 4) if self.tokens else None
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "mean_depth": mean}


class Reporter:
    """Writes what one request asked to see of every token."""

    def __init__(self, table: TokenTable, asked: SamplingFields) -> None:
        self.table, self.asked = table, asked
        self._ids = bool(asked.return_tokens_as_token_ids)

    def chat_logprobs(self, rows: Sequence[Sequence[Scored]], count: int) -> ChatLogprobs:
        return ChatLogprobs([self.token_logprob(row, count) for row in rows])

    def token_logprob(self, row: Sequence[Scored], count: int) -> TokenLogprob:
        """The chosen token and the `count` most probable ones."""
        chosen, *best = row
        data = self.table.bytes_of(chosen.token)
        top = [
            TopLogprob(self._text(entry), entry.logprob, list(self.table.bytes_of(entry.token)))
            for entry in best[:count]
        ]
        return TokenLogprob(self._text(chosen), chosen.logprob, list(data), top)

    def completion_logprobs(
        self, rows: Sequence[Sequence[Scored] | None], tokens: Sequence[int], count: int, offsets: Offsets
    ) -> CompletionLogprobs:
        """`rows` has an entry per token; None where nothing is known (the first token of a prompt)."""
        return CompletionLogprobs(
            [offsets.before(self.table.bytes_of(token)) for token in tokens],
            [None if row is None else row[0].logprob for row in rows],
            [self._name(token) for token in tokens],
            [None if row is None else self._named(row, count) for row in rows] if count else None,
        )

    def prompt_logprobs(self, report: PromptReport | None) -> list[Any] | UnsetType:
        """vLLM's form: per token a mapping from ids, as text."""
        if report is None or report.logprobs is None or self.asked.prompt_logprobs is None:
            return UNSET
        return [None if row is None else {str(s.token): self._vllm(s) for s in row} for row in report.logprobs]

    def extras(self, delta: Delta, deep: int | None) -> dict[str, Any]:
        """The fields of `answers.Extras` that were asked for."""
        asked, found = self.asked, dict[str, Any]()
        if asked.return_token_ids:
            found["token_ids"] = delta.tokens
        if asked.return_depths:
            found["depths"] = delta.depths
        if asked.return_continue_probs:
            found["continue_probs"] = delta.continue_probs or []
        if deep is not None and delta.depth_logprobs is not None:
            found["depth_logprobs"] = [[self.token_logprob(row, deep) for row in rows] for rows in delta.depth_logprobs]
        return found

    def _named(self, row: Sequence[Scored], count: int) -> dict[str, float]:
        """The `count` best and the chosen token; of tokens with one name the more probable one is kept."""
        named: dict[str, float] = {}
        for entry in [*row[1 : count + 1], row[0]]:
            named.setdefault(self._name(entry.token), entry.logprob)
        return named

    def _vllm(self, entry: Scored) -> dict[str, Any]:
        return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": self.table.text_of(entry.token)}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._ids else self.table.name_of(token)

    def _text(self, entry: Scored) -> str:
        return f"token_id:{entry.token}" if self._ids else self.table.text_of(entry.token)


def joined(deltas: Sequence[Delta]) -> Delta:
    """News of one sample that follow each other, as one."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1:
        return first

    def lists(name: str) -> Any:
        return None if getattr(last, name) is None else [row for delta in deltas for row in getattr(delta, name)]

    return Delta(
        first.id,
        first.index,
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        [depth for delta in deltas for depth in delta.depths],
        lists("logprobs"),
        lists("continue_probs"),
        lists("depth_logprobs"),
        next((delta.prompt for delta in deltas if delta.prompt is not None), None),
        last.ending,
        last.costs,
    )
