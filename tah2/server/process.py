"""A worker's process as the front sees it: started, spoken to, stopped; with tensor parallelism it is several."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from tah2.config.strict import ConfigError, plain
from tah2.server.config import WorkerConfig
from tah2.server.messages import Accepted, Broken, Command, Frames, News, Ready, Refused, Stop, frame, report_of

STOP_SECONDS = 5.0
"""A worker that was told to stop is killed after this time."""


class WorkerDied(Exception):
    """The worker ended while it ran the request."""


class Worker(asyncio.Protocol):
    """One worker's process (or, with tensor parallelism, processes) and the socket to it."""

    def __init__(self, config: WorkerConfig, hear: Callable[[News | Accepted | Refused], None]) -> None:
        self.config, self.hear = config, hear
        self.gone = asyncio.Event()
        self._frames = Frames()
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._transport: asyncio.Transport | None = None

    async def start(self) -> Ready:
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes = _spawn(self.config, theirs)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=ours)
        try:
            return await asyncio.wait_for(asyncio.shield(self._started), self.config.worker_start_seconds)
        except BaseException as error:
            self._started.cancel()
            await self.reap()
            if isinstance(error, TimeoutError):
                raise WorkerDied(f"The worker took more than {self.config.worker_start_seconds:g} s to load.") from None
            raise

    def send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(command))

    async def stop(self) -> None:
        self.send(Stop())
        with suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), STOP_SECONDS)
        await self.reap()

    async def reap(self) -> int | None:
        """End what is left of the processes; returns the first one's exit code. Other requests go on meanwhile."""
        if self._transport is not None:
            self._transport.close()
        return await asyncio.to_thread(self._bury)

    def _bury(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._processes[0].wait(0.5)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        return self._processes[0].returncode

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            report = report_of(body)
            if isinstance(report, Ready):
                self._started.set_result(report)
            elif isinstance(report, Broken):
                if not self._started.done():
                    self._started.set_exception(ConfigError(report.message))
            else:
                self.hear(report)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        if not self._started.done():
            self._started.set_exception(WorkerDied("The worker ended while it was loading; its log says why."))


def _spawn(config: WorkerConfig, end: socket.socket) -> list[subprocess.Popen[bytes]]:
    ranks = int(config.engine.get("tensor_parallel_size", 1))
    together: dict[str, str] = {}
    if ranks > 1:
        together = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = []
    for rank in range(ranks):
        descriptor = end.fileno() if rank == 0 else -1
        place: dict[str, Any] = {"RANK": str(rank), "LOCAL_RANK": str(rank), **together} if ranks > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tah2.server.worker", str(descriptor), json.dumps(plain(config))],
                pass_fds=[descriptor] if rank == 0 else [],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, **place},
            )
        )
    return processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
