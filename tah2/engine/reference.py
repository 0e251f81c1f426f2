"""The plain twin of the engine: one request at a time, one token at a time, no pool and no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tah2.engine.constraint import LogitsMask
from tah2.engine.params import SamplingParams
from tah2.engine.sampler import Draw, sample
from tah2.model.kinds import Output
from tah2.model.loop import LoopedDecoder, LoopSettings, Thresholded, Tokens
from tah2.model.scoring import score
from tah2.model.store import LoopStore


@dataclass
class ReferenceOutput:
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Iterations spent on the position from which each output token was drawn."""
    prompt_depths: list[int] = field(default_factory=list)
    mixed: list[Tensor] = field(default_factory=list)
    """The mixed distribution of each output token, fp32 `[vocabulary]`, as `output.mix` states it."""
    finish_reason: str = "length"


@torch.no_grad()
def generate(
    decoder: LoopedDecoder,
    prompt: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
    cached: bool = True,
    mask: LogitsMask | None = None,
) -> ReferenceOutput:
    """Continue `prompt`; `cached=False` runs the whole text again for every token."""
    out, ids = ReferenceOutput(), list(prompt)
    threshold = decoder.loop.exit_threshold if params.exit_threshold is None else params.exit_threshold
    store, seen = LoopStore(), 0
    endings = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    depths: list[int] = []
    while len(out.token_ids) < (params.max_tokens or 1 << 30):
        if not cached:
            store, seen, depths = LoopStore(), 0, []
        position = torch.arange(seen, len(ids))
        tokens = Tokens(torch.tensor(ids[seen:]), torch.zeros_like(position), position)
        settings = LoopSettings(
            router=Thresholded(threshold),
            max_depth=params.max_depth,
            run_all=position < len(prompt) if decoder.kind.prefill_runs_all else None,
        )
        scores = score(decoder, tokens, position == len(ids) - 1, settings, store)
        depths += scores.depths.tolist()
        store, seen = scores.run.store.settled(scores.depths), len(ids)
        draw = Draw(
            params,
            params.seed or 0,
            len(ids),
            prompt,
            out.token_ids,
            sorted(endings) if len(out.token_ids) < params.min_tokens else (),
            None if mask is None else mask.allowed(),
        )
        (token,) = sample(scores.logits, [draw], decoder.kind.output is not Output.LAST)
        out.prompt_depths = out.prompt_depths or list(depths)
        out.depths.append(depths[-1])
        out.mixed.append(scores.logits[0])
        out.token_ids.append(token)
        ids.append(token)
        mask = None if mask is None else mask.after(token)
        if token in endings or (mask is not None and mask.finished):
            out.finish_reason = "stop"
            break
    return out
