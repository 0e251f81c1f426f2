"""Run the server until it is told to stop: SIGTERM lets running requests finish, a second one does not."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from tah2.server import logs
from tah2.server.app import create_app
from tah2.server.config import ServerConfig, WorkerConfig


def run(worker: WorkerConfig, config: ServerConfig) -> int:
    """Serve; returns the process's exit code."""
    logs.configure(config.log_level)
    return serve_app(create_app(worker, config), config)


def serve_app(app: FastAPI, config: ServerConfig) -> int:
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(config.drain_timeout),
        )
    )
    server.run()
    return 0 if server.started else 1
