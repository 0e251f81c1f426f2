"""What the routes share: the engine, the tokenizer's side, the queue's bound, the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from tah2.server.async_engine import AsyncEngine
from tah2.server.config import ServerConfig
from tah2.server.errors import ApiError
from tah2.server.messages import ModelFacts


class Queue:
    """At most `limit` samples are in the engine at once, running and waiting."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0

    @contextmanager
    def room(self, samples: int) -> Iterator[None]:
        if samples > self.limit:
            raise ApiError(400, f"The request asks for {samples} samples; this server takes {self.limit} at once.")
        if self.held + samples > self.limit:
            message = "The server is busy and its queue is full; try again shortly."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self.held += samples
        try:
            yield
        finally:
            self.held -= samples


@dataclass
class Service:
    config: ServerConfig
    engine: AsyncEngine
    tokenizer: Any
    queue: Queue
    started: int = field(default_factory=lambda: int(time.time()))
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def facts(self) -> ModelFacts:
        assert self.engine.facts is not None
        return self.engine.facts

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.served_model_names or (self.engine.config.model,)

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries; a name that is not served is refused."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        served = ", ".join(repr(known) for known in self.model_names)
        raise ApiError(
            404, f"The model {name!r} is not served here; use {served}.", param="model", code="model_not_found"
        )


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
