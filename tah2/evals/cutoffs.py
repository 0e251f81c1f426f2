"""Records as they would be under a lower limit of output tokens.

A sample is a function of its seed and the position alone, so a response cut after C tokens is the response of a run
with that limit: same tokens, same depths, the text and the FLOPs of its beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tah2.config.strict import ConfigError
from tah2.evals.flops import FlopsModel
from tah2.evals.records import ERROR, SampleRecord
from tah2.evals.run_conversation import LENGTH

TextOf = Callable[[Sequence[int]], str]
"""Token ids of a response to its text, as the run itself made it."""


def cut(record: SampleRecord, limit: int, text_of: TextOf, flops: FlopsModel | None) -> SampleRecord:
    """The record of the same sample under `max_tokens = limit`; itself where it is no longer than that."""
    if limit < 1:
        raise ConfigError(f"A cutoff must be at least one token, not {limit}.")
    if "calls" in record.extra:
        raise ConfigError(f"Task {record.task!r} is a conversation with its environment; it cannot be cut afterwards.")
    if len(record.token_ids) <= limit or record.finish_reason == ERROR:
        return record
    tokens, depths = record.token_ids[:limit], record.depths[:limit]
    known = flops is not None and bool(depths) and bool(record.prompt_depth_counts)
    return dataclasses.replace(
        record,
        token_ids=tokens,
        depths=depths,
        text=text_of(tokens),
        finish_reason=LENGTH,
        decode_flops=int(flops.of_beginnings(record.prompt_depth_counts, depths)[-1]) if flops and known else None,
        seconds=seconds_until(record, limit),
    )


def seconds_until(record: SampleRecord, limit: int) -> float | None:
    """When token number `limit` came: an estimate that spreads the time after the first token evenly over passes.

    A run of its own at that limit would share its machine with other responses and need not measure the same.
    """
    if record.seconds is None or limit >= len(record.token_ids):
        return record.seconds
    first = record.first_token_seconds or 0.0
    passes = record.depths or [1] * len(record.token_ids)
    spent, total = sum(passes[1:limit]), sum(passes[1:])
    return first + (record.seconds - first) * spent / total if total else record.seconds
