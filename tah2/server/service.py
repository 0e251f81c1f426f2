"""What the routes share: the engine, the tokenizer's side, the queue's bound, the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from tah2.engine.params import SamplingParams
from tah2.server.async_engine import Ask, Front, Source
from tah2.server.config import ServerConfig
from tah2.server.errors import TOO_LONG, ApiError, invalid
from tah2.server.marks import THINK
from tah2.server.messages import Delta, ModelFacts
from tah2.server.metrics import Metrics, Watch
from tah2.server.render import Renderer
from tah2.server.tokens import TokenTable


class Queue:
    """At most `limit` samples are in the engine at once, running and waiting."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0

    def take(self, samples: int) -> None:
        if samples > self.limit:
            raise invalid(f"The request asks for {samples} samples; this server takes {self.limit} at once.", "n")
        if self.held + samples > self.limit:
            message = "The server is busy and its queue is full; try again shortly."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self.held += samples

    def give(self, samples: int) -> None:
        self.held -= samples


class Run:
    """Requests in the engine, watched by clock and metrics; close it."""

    def __init__(self, stream: Source, queue: Queue, samples: int, watch: Watch, deadline: float) -> None:
        self.stream, self.queue, self.samples, self.watch, self.deadline = stream, queue, samples, watch, deadline
        self._closed = False

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        """A request's place among those of the run, and its news."""
        async with asyncio.timeout_at(self.deadline):
            place, delta = await self.stream.__anext__()
        self.watch.see(place, delta)
        if delta.ending is not None and delta.ending.reason == "error":
            raise ApiError(500, f"The request failed: {delta.ending.error}", code="engine_error")
        return place, delta

    def close(self) -> None:
        """Abort what still runs; calling it twice does no harm."""
        if not self._closed:
            self._closed = True
            self.stream.close()
            self.queue.give(self.samples)


@dataclass
class Service:
    config: ServerConfig
    engine: Front
    tokenizer: Any
    metrics: Metrics
    queue: Queue
    renderer: Renderer
    table: TokenTable
    defaults: dict[str, Any]
    """Sampling parameters that the checkpoint recommends."""
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def facts(self) -> ModelFacts:
        assert self.engine.facts is not None
        return self.engine.facts

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.served_model_names or (self.engine.config.model,)

    @property
    def added_tokens(self) -> frozenset[str]:
        """What the tokenizer has beside its plain pieces."""
        return frozenset(self.tokenizer.get_added_vocab())

    @property
    def reasons(self) -> bool:
        """Answers may begin with a block of reasoning."""
        if self.config.reasoning == "auto":
            return THINK in self.renderer.source
        return self.config.reasoning == "on"

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries; a name that is not served is refused."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        served = ", ".join(repr(known) for known in self.model_names)
        message = f"The model {name!r} is not served here; use {served}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def check_length(
        self, prompt: Sequence[int], max_tokens: int | None, param: str, limit: str = "max_tokens"
    ) -> None:
        """`param` is the field that holds the prompt, `limit` the one that says `max_tokens`."""
        longest = self.facts.max_model_len
        if len(prompt) >= longest:
            message = f"The prompt has {len(prompt)} tokens; this model's context holds {longest} with the answer."
            raise invalid(message, param, TOO_LONG)
        if max_tokens is not None and len(prompt) + max_tokens > longest:
            message = (
                f"The prompt has {len(prompt)} tokens and up to {max_tokens} were asked for; this model's context "
                f"holds {longest} in total, so ask for at most {longest - len(prompt)}."
            )
            raise invalid(message, limit, TOO_LONG)

    async def start(self, asks: list[Ask]) -> Run:
        """Hand `asks` to the engine; returns once it has taken them."""
        deadline = asyncio.get_running_loop().time() + self.config.request_timeout
        samples = sum(ask.params.n for ask in asks)
        self.queue.take(samples)
        try:
            async with asyncio.timeout_at(deadline):
                stream = await self.engine.submit(asks)
        except BaseException:
            self.queue.give(samples)
            raise
        watch = Watch(self.metrics, asks, [self._ceiling(ask.params) for ask in asks])
        return Run(stream, self.queue, samples, watch, deadline)

    def _ceiling(self, params: SamplingParams) -> int:
        return self.facts.max_depth if params.max_depth is None else params.max_depth


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
