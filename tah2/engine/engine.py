"""The engine: add requests, call `step` until nothing is left.

One step is one pass over decode entries at any mixture of depths, prompt chunks, and drafts of next tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tah2.compute.decode import decode_flops
from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.intake import Intake, MaskFactory
from tah2.engine.kernels import gather
from tah2.engine.memory import make_pools
from tah2.engine.outputs import CompletionOutput, Logprob, RequestOutput, top_logprobs
from tah2.engine.params import SamplingParams
from tah2.engine.prefix import PrefixCache
from tah2.engine.request import Request
from tah2.engine.runner import Runner
from tah2.engine.sampler import Draw, sample_rows
from tah2.engine.scheduler import Scheduler
from tah2.engine.strand import Strand
from tah2.engine.team import ALONE, Team
from tah2.engine.wavefront import contradicted, mask_after
from tah2.engine.weights import Weights, choose_weights
from tah2.model.kinds import Output
from tah2.model.loop import LoopedDecoder

IDLE_CHECK_SECONDS = 10.0
"""An idle engine checks its slots this often, at most."""


@dataclass
class Group:
    """The samples of one request."""

    id: str
    prompt_text: str | None
    prompt: list[int]
    requests: list[Request]


@dataclass
class EngineStats:
    steps: int = 0
    entries: int = 0
    """Entries run in all passes."""
    output_tokens: int = 0
    depths: dict[int, int] = field(default_factory=dict)
    """Output tokens by the iterations spent on them."""
    decode_flops: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    agreed: int = 0
    wasted_entries: int = 0
    failed_requests: int = 0


class Engine:
    """Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        decoder: LoopedDecoder,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        weights: Weights | None = None,
        mask_factory: MaskFactory | None = None,
        team: Team = ALONE,
    ) -> None:
        self.decoder, self.tokenizer, self.team = decoder, tokenizer, team
        self.config = config = config or EngineConfig()
        if config.seed is None:
            self.config = replace(config, seed=team.agree(secrets.randbits(63)))
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = self.config.max_model_len or decoder.backbone.max_position_embeddings
        self.pools = make_pools(decoder, self.config, self.max_model_len, team)
        caches = self.config.enable_prefix_caching and not decoder.rotary.depends_on_length
        self.prefix = PrefixCache(self.pools) if caches else None
        self.scheduler = Scheduler(self.config, self.pools, self.prefix)
        self.runner = Runner(decoder, weights or choose_weights(decoder, self.config, team), self.pools)
        self.intake = Intake(
            decoder, self.config, self.pools, self.max_model_len, tokenizer, self.eos_token_ids, mask_factory
        )
        self.stats = EngineStats()
        self.weights_version = 0
        """Raise it after changing the weights: cached prefixes of older ones are then left to eviction."""
        self._mixture = decoder.kind.output is not Output.LAST
        self._groups: dict[str, Group] = {}
        self._checked = 0.0

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> None:
        """Queue a prompt (text or token ids); refuses at once what can never run."""
        params = params or SamplingParams()
        if request_id in self._groups:
            raise ConfigError(f"A request named {request_id!r} is running already; choose another id.")
        ids = self.intake.encode(prompt)
        requests = self.intake.requests(request_id, ids, params, self.prefix is not None, self.weights_version)
        self._groups[request_id] = Group(request_id, prompt if isinstance(prompt, str) else None, ids, requests)
        for request in requests:
            self.scheduler.add(request)
        self.stats.prompt_tokens += len(ids) * params.n

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its slots are free when this returns. None if it is not running."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        for request in group.requests:
            if not request.finished:
                self._finish(request, "abort")
        return self._output(group)

    def has_unfinished_requests(self) -> bool:
        return bool(self._groups)

    def preempt(self, request_id: str) -> None:
        """Make a running request give up its slots and wait; its output does not change."""
        for request in list(self.scheduler.running):
            if request.id == request_id:
                self.scheduler.preempt(request)

    @torch.inference_mode()
    def step(self, stream: bool = True) -> list[RequestOutput]:
        """Run one pass; returns the requests that have news (`stream=False`: only those that finished)."""
        if not self._groups:
            self._check_idle()
            return []
        news: dict[str, None] = {}
        chosen = self.scheduler.next_pass()
        now = time.monotonic()
        for strand in chosen.strands:
            if strand.request.metrics.first_scheduled_time is None:
                strand.request.metrics.first_scheduled_time = now
        failed = self._run(chosen.strands, chosen.drafting)
        ran = [strand for strand in chosen.strands if strand.request not in failed]
        self.stats.steps += 1
        failed |= self._draw(ran, chosen.drafting)
        for request in dict.fromkeys(strand.request for strand in ran):
            if request in failed:
                continue
            try:
                before = len(request.output)
                self._advance(request)
                if len(request.output) > before or request.finished:
                    news[request.id] = None
            except Exception as error:
                failed[request] = error
        for request, cause in failed.items():
            self._fail(request, cause)
            news[request.id] = None
        if chosen.drafting:
            self.scheduler.add_drafts()
        return self._collect(news, stream)

    def _collect(self, news: dict[str, None], stream: bool) -> list[RequestOutput]:
        outputs = []
        for name in news:
            group = self._groups[name]
            finished = all(request.finished for request in group.requests)
            if finished or stream:
                outputs.append(self._output(group))
            if finished:
                del self._groups[name]
        return outputs

    def _run(self, strands: list[Strand], drafting: bool) -> dict[Request, Exception]:
        """One pass; if it fails, each request runs alone and only those that fail again are lost.

        A rank of a team cannot know how far the others came, so there the error ends the engine.
        """
        if not strands:
            return {}
        self.stats.entries += sum(strand.rows for strand in strands)
        self._count_drafts(strands)
        try:
            self.runner.run(strands, drafting)
            return {}
        except Exception:
            if not self.team.alone:
                raise
            failed: dict[Request, Exception] = {}
        for request in dict.fromkeys(strand.request for strand in strands):
            try:
                self.runner.run([strand for strand in strands if strand.request is request], drafting)
            except Exception as error:
                failed[request] = error
        return failed

    def _count_drafts(self, strands: list[Strand]) -> None:
        for strand in strands:
            if strand.draft and strand.depth == 1:
                strand.request.metrics.drafted_tokens += 1

    def _draw(self, strands: list[Strand], drafting: bool) -> dict[Request, Exception]:
        """Draw the next token of every strand whose distribution is known."""
        ready = [
            strand
            for strand in strands
            if strand.samples
            and (strand.finished or (drafting and strand.request.drafts and len(strand) == 1))
            and len(strand) - 1 in strand.mixed
        ]
        if not ready:
            return {}
        failed: dict[Request, Exception] = {}
        try:
            for strand, token in zip(ready, self.team.first(partial(self._sampled, ready)), strict=True):
                strand.draw = token
        except Exception:
            for strand in ready:
                try:
                    (strand.draw,) = self.team.first(partial(self._sampled, [strand]))
                except Exception as error:
                    failed[strand.request] = error
        return failed

    def _sampled(self, strands: list[Strand]) -> list[int]:
        rows = [strand.mixed[len(strand) - 1] for strand in strands]
        return sample_rows(rows, [self._draw_of(strand) for strand in strands], self._mixture)

    def _draw_of(self, strand: Strand) -> Draw:
        request = strand.request
        output = request.output_before(strand)
        mask = mask_after(request, strand)
        early = len(output) < request.params.min_tokens
        return Draw(
            request.params,
            request.seed,
            strand.end,
            request.prompt.tolist() if request.params.repetition_penalty != 1 else (),
            output,
            sorted(request.endings) if early else (),
            None if mask is None else mask.allowed(),
        )

    def _advance(self, request: Request) -> None:
        """Discard contradicted drafts, settle what has finished, accept its draws."""
        self.scheduler.discard(request, contradicted(request))
        while request.strands and request.strands[0].finished:
            strand = request.strands.pop(0)
            replayed = len(request.depths)
            request.record(strand)
            self.scheduler.estimate.record(request, request.depths[replayed:])
            self._prompt_logprobs(request, strand)
            self.scheduler.publish(request, len(request.prompt))
            if strand.samples:
                assert strand.draw is not None
                self._accept(request, strand, strand.draw)
                if request.finished:
                    return
                if request.strands:
                    request.strands[0].draft = False
                    request.metrics.agreed_tokens += 1

    def _accept(self, request: Request, strand: Strand, token: int) -> None:
        params, row = request.params, strand.mixed[len(strand) - 1].value
        if params.logprobs is not None:
            (entry,) = top_logprobs(row[None], [token], params.logprobs)
            request.logprobs.append(self._named(entry))
            request.cumulative_logprob += entry[token].logprob
        if params.depth_logprobs:
            depths = top_logprobs(
                torch.stack(strand.depth_logits), [token] * len(strand.depth_logits), params.logprobs or 0
            )
            request.depth_logprobs.append([self._named(entry) for entry in depths])
        if not request.output:
            request.metrics.first_token_time = time.monotonic()
        depth = int(strand.executed[-1])
        request.output.append(token)
        request.output_depths.append(depth)
        request.continue_probs.append(strand.continue_probs)
        request.ids.extend(np.array([token]))
        self.stats.output_tokens += 1
        self.stats.depths[depth] = self.stats.depths.get(depth, 0) + 1
        if request.mask is not None:
            request.mask = request.mask.after(token)
        self._check_end(request, token)

    def _check_end(self, request: Request, token: int) -> None:
        early = len(request.output) < request.params.min_tokens
        ends = token in request.endings
        detokenizer, found = request.detokenizer, False
        if detokenizer is not None and not (ends and token in self.eos_token_ids and detokenizer.skip):
            found = detokenizer.add(token, look_for_stops=not early)
        if ends:
            request.stop_reason = token if token in request.params.stop_token_ids else None
            self._finish(request, "stop")
        elif found and detokenizer is not None:
            request.stop_reason = detokenizer.stopped
            self._finish(request, "stop")
        elif request.mask is not None and request.mask.finished:
            self._finish(request, "stop")
        elif len(request.output) >= request.max_tokens:
            self._finish(request, "length")

    def _prompt_logprobs(self, request: Request, strand: Strand) -> None:
        count = request.params.prompt_logprobs
        if count is None:
            return
        first = len(request.prompt_logprobs) - 1 - strand.start
        last = min(len(strand), len(request.prompt) - 1 - strand.start)
        if first < last:
            targets = request.prompt[strand.start + first + 1 : strand.start + last + 1].tolist()
            rows = top_logprobs(gather([strand.mixed[row] for row in range(first, last)]), targets, count)
            request.prompt_logprobs.extend(self._named(entry) for entry in rows)

    def _named(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return entry
        return {
            token: Logprob(value.logprob, value.rank, self.tokenizer.decode([token])) for token, value in entry.items()
        }

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        request.metrics.finished_time = time.monotonic()
        if request.detokenizer is not None:
            request.detokenizer.end()
        self.scheduler.finish(request, keep=reason != "error")
        metrics = request.metrics
        self.stats.preemptions += metrics.num_preemptions
        self.stats.cached_tokens += metrics.num_cached_tokens
        self.stats.drafted += metrics.drafted_tokens
        self.stats.agreed += metrics.agreed_tokens
        self.stats.wasted_entries += metrics.wasted_entries
        self.stats.decode_flops += self._flops(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = f"{type(error).__name__}: {error}"
        self.stats.failed_requests += 1
        if not request.finished:
            self._finish(request, "error")

    def _flops(self, request: Request) -> int:
        if len(request.output_depths) < 2:
            return 0
        prompt = request.depths[: len(request.prompt)]
        decoded = request.output_depths[1:]
        return decode_flops(self.decoder.backbone, self.decoder.loop, prompt, decoded, request.ceiling)

    def _output(self, group: Group) -> RequestOutput:
        first = group.requests[0]
        logprobs = first.params.prompt_logprobs is not None
        return RequestOutput(
            group.id,
            group.prompt_text,
            group.prompt,
            list(first.prompt_logprobs) if logprobs else None,
            [self._completion(request) for request in group.requests],
            first.depths[: len(group.prompt)],
        )

    def _completion(self, request: Request) -> CompletionOutput:
        text, params = request.detokenizer, request.params
        return CompletionOutput(
            request.index,
            "" if text is None else text.ready,
            list(request.output),
            None if params.logprobs is None else request.cumulative_logprob,
            None if params.logprobs is None else list(request.logprobs),
            request.finish_reason,
            request.stop_reason,
            list(request.output_depths),
            list(request.continue_probs),
            list(request.depth_logprobs) if params.depth_logprobs else None,
            self._flops(request) if request.finished else None,
            request.metrics,
            request.error,
        )

    def _check_idle(self) -> None:
        now = time.monotonic()
        if now - self._checked >= IDLE_CHECK_SECONDS:
            self._checked = now
            self.check()

    def check(self) -> None:
        """Every slot is free or has one owner; when nothing runs, the prefix cache owns them all."""
        looped, once = self.prefix.owned() if self.prefix is not None else ([], [])
        for request in self.scheduler.running:
            own = request.lists.tokens(request.cached)
            looped.append(own.looped)
            once.append(own.once)
            for strand in request.strands:
                held = strand.held()
                looped.append(np.asarray(held[0], dtype=np.int64))
                once.append(np.asarray(held[1], dtype=np.int64))
        nothing = np.empty(0, dtype=np.int64)
        self.pools.check(np.concatenate([nothing, *looped]), np.concatenate([nothing, *once]))
