"""Run the server until it is told to stop: SIGTERM lets running requests finish, a second one does not."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from tah2.config.strict import ConfigError
from tah2.server import logs
from tah2.server.app import create_app
from tah2.server.config import ServerConfig, WorkerConfig
from tah2.server.patience import patient
from tah2.server.service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_SECONDS = 120
"""An idle connection is kept for longer than clients and proxies keep theirs in a pool (aiohttp 15, Go 90): else they
would send requests into connections that are being closed."""


def run(
    worker: WorkerConfig, config: ServerConfig, replicas: int = 1, say: Callable[[str], None] = lambda line: None
) -> int:
    """Load and serve; returns the process's exit code. `say` hears where."""
    from tah2.server.replicas import Replicas

    logs.configure(config.log_level)
    several = (lambda heard: Replicas(worker, replicas, heard)) if replicas != 1 else None
    return serve_app(create_app(worker, config, engine=several), config, say)


def serve_app(app: FastAPI, config: ServerConfig, say: Callable[[str], None] = lambda line: None) -> int:
    """Serve `app` on the configured address; a port that is taken is known before the model is loaded."""
    settings = settings_for(app, config)
    with _listener(config) as listener, asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
        runner.run(_serve(app, settings, listener, say))
    return 0


def settings_for(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=patient(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
    )


async def _serve(app: FastAPI, settings: uvicorn.Config, listener: socket.socket, say: Callable[[str], None]) -> None:
    """The application's life around the listening: what cannot start says so before anybody can ask."""
    async with app.router.lifespan_context(app):
        await Listening(settings, app.state.service, say).serve([listener])


class Listening(uvicorn.Server):
    """Says where it listens once it does; drains at the first signal, leaves at the second."""

    def __init__(self, settings: uvicorn.Config, service: Service, say: Callable[[str], None]) -> None:
        super().__init__(settings)
        self.service, self.say = service, say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self.say(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._drain)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _drain(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = self.service.draining = True


def _listener(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {config.host}:{config.port} ({error.strerror}); choose another --host or --port."
        ) from None
    return listener
