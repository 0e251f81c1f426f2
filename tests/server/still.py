"""A server without a model: everything before and behind the engine, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from threading import Thread
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from tah2.server.app import ROUTERS, create_app
from tah2.server.async_engine import Ask, NotReady
from tah2.server.config import ServerConfig, WorkerConfig
from tah2.server.messages import Counters, Delta, ModelFacts
from tests.server.tiny import MAX_LEN, VOCABULARY, tokenizer

FACTS = ModelFacts(MAX_LEN, VOCABULARY, [258], "tah2", 3, 0.5, True, True, 4, 100, 1)


class Script:
    """A submission of which everything is known before."""

    def __init__(self, news: Sequence[Delta]) -> None:
        self.news, self.closed = list(news), False

    def __aiter__(self) -> Script:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        await asyncio.sleep(0)
        if not self.news:
            raise StopAsyncIteration
        return 0, self.news.pop(0)

    def close(self) -> None:
        self.closed = True


class Still:
    """An engine that answers `news` to everything, or is not ready where there are none."""

    config, facts, counters, ready = WorkerConfig("tiny"), FACTS, Counters(), True

    def __init__(self, news: Sequence[Delta] = ()) -> None:
        self.news = news

    async def start(self) -> ModelFacts:
        return FACTS

    async def stop(self) -> None:
        pass

    async def submit(self, asks: Sequence[Ask]) -> Script:
        if not self.news:
            raise NotReady("The model is being loaded; try again shortly.")
        return Script(self.news)


def still_app(news: Sequence[Delta] = (), routers: Any = ROUTERS, made: Any = None, **config: Any) -> FastAPI:
    settings = ServerConfig(generation_config="off", **config)
    return create_app(
        Still.config, settings, engine=lambda heard: Still(news), tokenizer=made or tokenizer(), routers=routers
    )


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app`, on the same loop."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The address of `app`, which answers from a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
