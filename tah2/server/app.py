"""The application: routes, errors, the door, and the life of the engine behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from tah2 import __version__
from tah2.config.strict import ConfigError
from tah2.server import errors
from tah2.server.async_engine import AsyncEngine, Front
from tah2.server.config import ServerConfig, WorkerConfig
from tah2.server.door import Door
from tah2.server.messages import Counters
from tah2.server.metrics import Metrics
from tah2.server.page import add_page
from tah2.server.render import Renderer
from tah2.server.routes import completions, models, operations
from tah2.server.routes.schema import components
from tah2.server.service import Queue, Service
from tah2.server.tokens import TokenTable

ROUTERS: tuple[APIRouter, ...] = (completions.router, models.router, operations.router)
"""Every family of routes; a new one is a module of `tah2.server.routes` and a line here."""

OnCounters = Callable[[Counters, Counters], None]


def create_app(
    worker: WorkerConfig,
    config: ServerConfig | None = None,
    *,
    engine: Callable[[OnCounters], Front] | None = None,
    tokenizer: Any = None,
    routers: Sequence[APIRouter] = ROUTERS,
) -> FastAPI:
    """An ASGI application that serves one model; its lifespan starts and stops the worker.

    `engine` makes another front of engines than the one worker (several replicas, say); it is given the function that
    hears how their counters grow.
    """
    config = config or ServerConfig()

    metrics = Metrics((config.served_model_names or (worker.model,))[0], config.metrics_prefix)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        made = AsyncEngine(worker, metrics.counters) if engine is None else engine(metrics.counters)
        metrics.state = lambda: made.counters
        reading = asyncio.create_task(asyncio.to_thread(load_tokenizer, worker.model, tokenizer))
        try:
            facts, held = await made.start(), await reading
            app.state.service = Service(
                config=config,
                engine=made,
                tokenizer=held,
                metrics=metrics,
                queue=Queue(facts.max_num_seqs + config.max_queue),
                renderer=Renderer(held, config.chat_template, facts.max_model_len),
                table=TokenTable(held),
                defaults=sampling_defaults(worker.model) if config.generation_config == "auto" else {},
            )
            yield
        finally:
            await asyncio.gather(reading, return_exceptions=True)
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
    describe(app)
    add_page(app)
    app.add_middleware(Door, config=config)
    if config.allow_origins:  # outside of the door: pages may read what it refuses
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def load_tokenizer(model: str, given: Any = None) -> Any:
    """The checkpoint's tokenizer, unless one is `given`."""
    if given is not None:
        return given
    try:
        return _plain_tokenizer(Path(model)) or _any_tokenizer(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The checkpoint {model} has no tokenizer that can be read: {error}") from None


def _plain_tokenizer(folder: Path) -> Any:
    """One that is nothing but its `tokenizer.json`, read without PyTorch; None if it is more."""
    try:
        kind = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    except (OSError, ValueError):
        return None
    if kind not in ("PreTrainedTokenizerFast", "TokenizersBackend") or not (folder / "tokenizer.json").is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def _any_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def sampling_defaults(model: str) -> dict[str, Any]:
    """Sampling parameters that the checkpoint's generation config sets."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(model).to_diff_dict()
    except OSError:
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: config[name] for name in names if config.get(name) is not None}


def describe(app: FastAPI) -> None:
    """Join the schemas of bodies and answers into the OpenAPI document."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)  # wrong values are answered with 400
        document["components"] = {"schemas": components()}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
