"""The application: routes, errors, the door, and the life of the engine behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from tah2 import __version__
from tah2.server import errors
from tah2.server.async_engine import AsyncEngine
from tah2.server.config import ServerConfig, WorkerConfig
from tah2.server.door import Door
from tah2.server.page import add_page
from tah2.server.routes import operations
from tah2.server.service import Queue, Service

ROUTERS: tuple[APIRouter, ...] = (operations.router,)
"""Every family of routes; a new one is a module of `tah2.server.routes` and a line here."""


def create_app(
    worker: WorkerConfig,
    config: ServerConfig | None = None,
    *,
    engine: AsyncEngine | None = None,
    tokenizer: Any = None,
    routers: Sequence[APIRouter] = ROUTERS,
) -> FastAPI:
    """An ASGI application that serves one model; its lifespan starts and stops the worker.

    `engine` replaces the one that `worker` describes (several replicas behind one front, say); it needs `start`,
    `stop`, `generate`, `ready`, `facts` and `counters` of `AsyncEngine`.
    """
    config = config or ServerConfig()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        made = engine or AsyncEngine(worker)
        facts = await made.start()
        try:
            held = tokenizer if tokenizer is not None else load_tokenizer(worker.model)
            app.state.service = Service(config, made, held, Queue(facts.max_num_seqs + config.max_queue))
            yield
        finally:
            await made.stop()

    app = FastAPI(
        title="tah2",
        version=__version__,
        summary="OpenAI-compatible API of an adaptive looped model",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    for router in routers:
        app.include_router(router)
    add_page(app)
    if config.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Door, config=config)
    return app


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
