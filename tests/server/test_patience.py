"""Slow and endless heads are cut off; honest clients are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from socket import create_connection
from threading import Thread

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from tah2.server.config import ServerConfig
from tah2.server.patience import patient
from tah2.server.run import settings_for


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """/slow takes longer than a head may, /refuse answers before it has read the body, others read it."""
    if scope["path"] == "/slow":
        await asyncio.sleep(0.9)
    elif scope["path"] != "/refuse":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def served() -> Iterator[int]:
    config = uvicorn.Config(app, port=0, http=patient(0.6, 8 << 10), ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served() as number:
        yield number


def closed_after(port: int, first: bytes, drip: bytes = b"", patience: float = 20) -> float:
    """Seconds until the server hangs up on a client that sends `first`, then `drip` again and again."""
    started = time.monotonic()
    with closing(create_connection(("127.0.0.1", port))) as client:
        client.settimeout(0.05)
        try:
            client.sendall(first)
            while time.monotonic() - started < patience:
                if drip:
                    client.sendall(drip)
                try:
                    if client.recv(1 << 16) == b"":
                        return time.monotonic() - started
                except TimeoutError:
                    continue
        except (ConnectionResetError, BrokenPipeError):
            return time.monotonic() - started
    raise AssertionError("The connection stayed open.")


def test_idle_connections_outlive_those_in_the_pools_of_clients():
    """aiohttp keeps them for 15 seconds, proxies in Go for 90; who closes first decides whether requests get lost."""
    assert settings_for(FastAPI(), ServerConfig()).timeout_keep_alive > 90


HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD, b"X: y\r\n"),
        (HEAD + b"\r\n" + HEAD, b"X: y\r\n"),
        (b"POST /refuse HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n", b"x"),
    ],
    ids=["silence", "half a head", "a dripping head", "a dripping second head", "a dripping refused body"],
)
def test_what_never_comes_to_the_point_is_cut_off(port: int, first: bytes, drip: bytes):
    assert closed_after(port, first, drip) > 0.3


def test_an_endless_head_is_cut_off_at_its_bound(port: int):
    assert closed_after(port, HEAD, b"X: " + b"y" * 4000 + b"\r\n") < 0.6


def test_slow_answers_large_bodies_and_further_requests_are_not(port: int):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/slow").text == "ok"
        assert client.post("/", content=b"x" * 3_000_000).text == "ok"
        assert client.post("/refuse", content=b"x" * 300_000).text == "ok"
        for _ in range(3):
            time.sleep(0.1)
            assert client.get("/").text == "ok"
