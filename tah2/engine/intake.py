"""The door: prompts and parameters become requests, and what can never run is refused with one sentence."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.constraint import LogitsMask
from tah2.engine.detokenize import Detokenizer
from tah2.engine.outputs import RequestMetrics
from tah2.engine.params import SamplingParams, StructuredOutputsParams
from tah2.engine.pool import Pools
from tah2.engine.request import Request
from tah2.engine.sampler import sample_seed
from tah2.engine.slots import Sight
from tah2.model.kinds import Output
from tah2.model.loop import LoopedDecoder

MaskFactory = Callable[[StructuredOutputsParams], LogitsMask]
"""Makes a constraint's state before the first output token."""


class Intake:
    def __init__(
        self,
        decoder: LoopedDecoder,
        config: EngineConfig,
        pools: Pools,
        max_model_len: int,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        mask_factory: MaskFactory | None,
    ) -> None:
        self.decoder, self.config, self.pools, self.max_model_len = decoder, config, pools, max_model_len
        self.tokenizer, self.eos_token_ids, self.mask_factory = tokenizer, eos_token_ids, mask_factory
        self._random = random.Random(config.seed)
        self._arrivals = 0

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ConfigError("This engine has no tokenizer: pass token ids instead of text.")
        ids: list[int] = self.tokenizer.encode(prompt)
        return ids

    def requests(
        self, request_id: str, ids: list[int], params: SamplingParams, caches: bool, weights_version: int
    ) -> list[Request]:
        """One request per sample."""
        ceiling = self.decoder.ceiling(params.max_depth)
        max_tokens = self.max_tokens(ids, params, ceiling)
        self._check(ids, params, ceiling)
        mask = None if params.structured_outputs is None else self._mask(params.structured_outputs)
        threshold = self.decoder.loop.exit_threshold if params.exit_threshold is None else params.exit_threshold
        kind, gated = self.decoder.kind, self.decoder.gate is not None
        sight = Sight.of(kind.rule, ceiling)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        prompt, now, made = np.asarray(ids, dtype=np.int64), time.monotonic(), []
        for index in range(params.n):
            self._arrivals += 1
            request = Request(
                id=request_id,
                index=index,
                order=self._arrivals,
                prompt=prompt,
                params=params,
                seed=sample_seed(seed, index),
                max_tokens=max_tokens,
                ceiling=ceiling,
                threshold=threshold,
                sight=sight,
                endings=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids),
                runs_all=kind.prefill_runs_all and gated,
                drafts=ceiling > 1 and sight.never_waits and not kind.loops_middle,
                cache_key=(weights_version, ceiling, threshold if gated else None) if caches else None,
                metrics=RequestMetrics(now),
                detokenizer=self._detokenizer(ids, params),
                mask=mask,
            )
            made.append(request)
        return made

    def max_tokens(self, ids: list[int], params: SamplingParams, ceiling: int) -> int:
        """Output tokens that this request may have, at most."""
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ConfigError(
                f"The prompt has {len(ids)} tokens, but the longest prompt plus output is {self.max_model_len}; "
                "shorten the prompt."
            )
        held = self.pools.looped.slots.capacity // ceiling
        if self.pools.once is not None:
            held = min(held, self.pools.once.slots.capacity)
        fits = held - len(ids) + 1  # the last output token has no keys
        wanted = min(room, max(fits, 1)) if params.max_tokens is None else min(room, params.max_tokens)
        if wanted > fits:
            raise ConfigError(
                f"{len(ids)} prompt and {wanted} output tokens at depth {ceiling} never fit a pool of "
                f"{self.pools.looped.slots.capacity} slots; "
                + (f"ask for at most {fits} tokens." if fits > 0 else "shorten the prompt or raise kv_memory_gib.")
            )
        return wanted

    def _check(self, ids: list[int], params: SamplingParams, ceiling: int) -> None:
        vocabulary = self.decoder.backbone.vocab_size
        params.check_vocabulary(vocabulary)
        if not ids:
            raise ConfigError("The prompt is empty; give at least one token.")
        if any(not 0 <= token < vocabulary for token in ids):
            raise ConfigError(f"Prompt token ids must lie between 0 and {vocabulary - 1}.")
        if params.stops and self.tokenizer is None:
            raise ConfigError("Stop strings need a tokenizer; this engine has none.")
        if params.depth_logprobs and (self.decoder.kind.loops_middle or self.decoder.kind.output is Output.LAST):
            raise ConfigError("depth_logprobs needs a loop that mixes the predictions of its depths.")

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer, ids, params.stops, params.include_stop_str_in_output, params.skip_special_tokens
        )

    def _mask(self, wanted: StructuredOutputsParams) -> LogitsMask:
        if self.mask_factory is None:
            raise ConfigError("Structured outputs need a tokenizer and the structured extra (llguidance).")
        return self.mask_factory(wanted)
