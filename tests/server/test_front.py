"""The front alone: what clients hear when something breaks, and that nobody waits for somebody else."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import pytest
from fastapi import APIRouter

from tah2.server.config import WorkerConfig
from tah2.server.messages import Delta, Ending
from tah2.server.process import Worker
from tests.server.still import asking, still_app
from tests.server.tiny import tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "return_depths": True}


def test_a_mistake_of_the_server_is_answered_with_its_request_s_id_and_logged(caplog: pytest.LogCaptureFixture):
    router = APIRouter()

    @router.get("/broken")
    async def broken() -> None:
        raise KeyError("a secret of the inside")

    async def scene() -> Any:
        async with asking(still_app(routers=[router])) as client:
            return await client.get("/broken", headers={"X-Request-Id": "mine-1"})

    with caplog.at_level(logging.INFO, "tah2.server"):
        answer = asyncio.run(scene())
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    told = {record.getMessage(): record for record in caplog.records}
    assert vars(told["a request failed"])["fields"] == {"request_id": "mine-1"}
    assert told["a request failed"].exc_info is not None
    assert vars(told["request"])["fields"]["status"] == 500


def test_pages_of_friends_may_read_why_they_are_refused():
    async def scene() -> Any:
        app = still_app(api_keys=("k",), allow_origins=("https://friend.example",))
        async with asking(app) as client:
            return await client.get("/v1/models", headers={"Origin": "https://friend.example"})

    answer = asyncio.run(scene())
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("include", [True, False])
def test_a_chunk_holds_reasoning_or_answer_but_not_both(include: bool):
    """Steps may bring several tokens, the last of a thought and the first of an answer among them."""
    ending = Ending("stop", None, None, 10, 5, 0.0, 0, 0)
    news = [
        Delta("r", 0, "<think>So", [1, 2], [1, 3]),
        Delta("r", 0, " it is.</think>\n\nYes", [3, 4, 5], [1, 1, 2]),
        Delta("r", 0, "!", [6], [1], ending=ending),
    ]

    async def scene() -> Any:
        async with asking(still_app(news)) as client:
            return await client.post("/v1/chat/completions", json={**CHAT, "include_reasoning": include})

    lines = [line.removeprefix("data: ") for line in asyncio.run(scene()).text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    deltas = [choice["delta"] for choice in choices]
    assert not [delta for delta in deltas if delta.get("reasoning_content") and delta.get("content")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == ("So it is." if include else "")
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes!"
    assert [depth for choice in choices for depth in choice.get("depths", [])] == [1, 3, 1, 1, 2, 1]


class Slow:
    """A tokenizer that decodes when it is told to."""

    def __init__(self) -> None:
        self.real, self.go = tokenizer(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def decode(self, *given: Any, **options: Any) -> Any:
        assert self.go.wait(10), "nobody else was served meanwhile"
        return self.real.decode(*given, **options)


def test_decoding_many_tokens_keeps_nobody_waiting():
    slow = Slow()

    async def scene() -> Any:
        async with asking(still_app(made=slow)) as client:
            decoding = asyncio.create_task(client.post("/detokenize", json={"tokens": [65, 66]}))
            await asyncio.sleep(0.05)
            assert (await client.get("/health")).status_code == 200
            slow.go.set()
            return await decoding

    assert asyncio.run(scene()).json() == {"prompt": tokenizer().decode([65, 66])}


class Dying:
    """A process that takes its time to end."""

    returncode = -9

    def __init__(self) -> None:
        self.gone = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        assert self.gone.wait(10), "nobody else was served meanwhile"
        return self.returncode

    def poll(self) -> int:
        return self.returncode


def test_the_end_of_a_dead_worker_keeps_nobody_waiting():
    async def scene() -> int | None:
        worker, process = Worker(WorkerConfig("nowhere"), print), Dying()
        worker._processes = [process]  # type: ignore[list-item]
        reaping = asyncio.create_task(worker.reap())
        await asyncio.sleep(0.05)
        process.gone.set()
        return await reaping

    assert asyncio.run(scene()) == -9
