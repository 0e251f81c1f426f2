"""What strangers may cost: texts that cannot fit, depths without end, clients that take nothing, borrowed names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from tah2.config.strict import ConfigError
from tah2.server.config import ServerConfig
from tah2.server.door import Door
from tah2.server.errors import ApiError
from tah2.server.render import Renderer
from tah2.server.transport import EventStream
from tests.server.process import ServerProcess
from tests.server.tiny import tokenizer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def status_for(config: ServerConfig, host: str | None, path: str = "/v1/models") -> int:
    """What the door answers to a request that calls the server `host`."""
    statuses: list[int] = []

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    headers = [] if host is None else [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    asyncio.run(Door(inside, config)(scope, receive, send))
    return statuses[0]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "a.localhost", "127.1.2.3", None]
)
def test_a_local_server_answers_to_this_machine_s_names(host: str | None):
    assert status_for(ServerConfig(), host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "0.0.0.0:8000", "127.0.0.1.evil.example", "[::2]"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/health"])
def test_a_local_server_does_not_answer_to_borrowed_names(host: str, path: str):
    assert status_for(ServerConfig(), host, path) == 403


def test_names_may_be_allowed_and_do_not_matter_on_a_network_or_behind_a_key():
    assert status_for(ServerConfig(allow_hosts=("models.example",)), "models.example:443") == 200
    assert status_for(ServerConfig(host="0.0.0.0"), "models.example") == 200
    assert status_for(ServerConfig(api_keys=("k",)), "models.example") == 401


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self) -> None:
        self.real, self.characters = tokenizer(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        ids: list[int] = self.real.encode(text, **options)
        return ids


@pytest.mark.parametrize("length", [10_000, 10_000_000])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(length: int):
    counting = Counting()
    with pytest.raises(ApiError, match="context of 100 tokens") as refused:
        Renderer(counting, context=100).bound("x" * length, "prompt")
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    assert counting.characters <= 800


def test_texts_that_may_fit_pass():
    Renderer(tokenizer(), context=100).bound("x" * 100, "prompt")
    Renderer(tokenizer(), context=100).bound("<tool_response>" * 95, "prompt")
    Renderer(tokenizer(), context=100).bound("x" * 1200, "prompt", whole=False)
    Renderer(tokenizer()).bound("x" * 10_000_000, "prompt")


def test_huge_texts_are_refused_over_http(server: ServerProcess):
    assert server.error(TEXT, prompt="x" * 5_000_000)["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": "x" * 5_000_000}]
    assert server.error(CHAT, messages=messages)["param"] == "messages"
    assert server.error("/tokenize", prompt="x" * 5_000_000)["param"] == "prompt"


def test_depth_without_end_is_refused(server: ServerProcess):
    for route, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        assert server.error(route, max_depth=10_000, **body)["param"] == "max_depth"
    with pytest.raises(ConfigError, match="stall_timeout"):
        ServerConfig(stall_timeout=0)


def test_a_client_that_takes_nothing_is_left():
    closed, taken = [], 0

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"data: x\n\n"

    async def send(message: Message) -> None:
        nonlocal taken
        taken += 1
        if taken > 3:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def scene() -> None:
        stream = EventStream(events(), lambda: closed.append(True), stall=0.05)
        async with asyncio.timeout(20):
            await stream({"type": "http"}, receive, send)

    asyncio.run(scene())
    assert closed == [True]
    assert taken == 4
