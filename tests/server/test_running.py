"""Keys, limits, clients that leave, workers that die, and the end: a server of its own, small enough to fill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tah2.engine.params import SamplingParams
from tah2.server.async_engine import Ask
from tah2.server.door import Keys
from tah2.server.messages import Delta
from tah2.server.metrics import Metrics, Watch
from tah2.server.service import Queue, Run
from tests.server.process import ServerProcess

TEXT = "/v1/completions"
KEY = {"Authorization": "Bearer open sesame"}
LONG: dict[str, Any] = {"prompt": "Go on", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[ServerProcess]:
    """Two samples run, two wait."""
    options = ("--max-num-seqs", "2", "--max-queue", "2", "--max-body-bytes", "20000")
    options += ("--allow-origin", "https://friend.example")
    made = ServerProcess(checkpoint, *options, env={"TAH2_API_KEY": "open sesame"})
    made.http.headers.update(KEY)
    yield made
    if made.process.poll() is None:
        made.stop()


def until(condition: Any, patience: float = 30) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def idle(server: ServerProcess) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_slots_used")
    return all(server.metric(name) == 0 for name in names)


def test_a_key_opens_the_door(small: ServerProcess):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open sesame"}):
        for path in (TEXT, "/v1/models", "/metrics", "/tokenize", "/openapi.json", "/absent"):
            answer = httpx.get(small.url + path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(small.url + "/health").status_code == 200
    assert httpx.get(small.url + "/ready").status_code == 200
    assert small.http.get("/v1/models").status_code == 200
    assert "open sesame" not in json.dumps(small.log)


def test_keys_are_compared_as_wholes():
    keys = Keys(["one", "twö"])
    assert keys.fits("one")
    assert keys.fits("twö")
    assert not any(keys.fits(wrong) for wrong in ("", "on", "onee", "ONE", "one\x00"))
    assert not Keys([])


def test_large_bodies_are_refused_before_they_are_read(small: ServerProcess):
    problem = small.error(TEXT, status=413, prompt="x" * 30_000)
    assert problem["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"x" * 1000

    answer = small.http.post(TEXT, content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_friendly_origin_may_call(small: ServerProcess):
    headers = {"Origin": "https://friend.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(small.url + TEXT, headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    stranger = httpx.options(small.url + TEXT, headers={**headers, "Origin": "https://stranger.example"})
    assert "access-control-allow-origin" not in stranger.headers


def test_a_full_queue_says_when_to_come_back(small: ServerProcess):
    statuses: list[int] = []
    waits: list[str | None] = []

    def ask() -> None:
        answer = small.http.post(TEXT, json={**LONG, "max_tokens": 150})
        statuses.append(answer.status_code)
        if answer.status_code == 429:
            waits.append(answer.headers["retry-after"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4
    assert set(waits) == {"1"}
    assert small.error(TEXT, prompt="x", n=5)["param"] == "n"
    until(lambda: idle(small))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_work(small: ServerProcess, stream: bool):
    before = small.metric("generation_tokens_total")
    body = {**LONG, "max_tokens": 1000, "stream": stream}
    if stream:
        with small.http.stream("POST", TEXT, json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            small.http.post(TEXT, json=body, timeout=0.3)
    until(lambda: idle(small), patience=10)
    assert small.metric("generation_tokens_total") - before < 1000
    assert small.metric("kv_slots_cached") > 0


def test_a_killed_worker_fails_its_requests_and_comes_back(small: ServerProcess):
    truth = small.post(TEXT, prompt="again", max_tokens=5, temperature=0)["choices"][0]["text"]
    with small.http.stream("POST", TEXT, json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(small.worker, signal.SIGKILL)
        *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "worker_died"
    assert "try again" in error["message"]
    away = small.http.post(TEXT, json={"prompt": "again"})
    if away.status_code != 200:  # unless it was back at once
        assert away.status_code == 503
        assert away.json()["error"]["code"] == "not_ready"
        assert away.headers["retry-after"]
    until(lambda: small.http.get("/ready").status_code == 200, patience=120)
    assert small.post(TEXT, prompt="again", max_tokens=5, temperature=0)["choices"][0]["text"] == truth
    assert small.metric("generation_tokens_total") > 0
    until(lambda: idle(small))


class Silent:
    """A request of which nothing is heard."""

    closed = 0

    def __aiter__(self) -> Silent:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        await asyncio.sleep(60)
        raise AssertionError

    def close(self) -> None:
        self.closed += 1


def test_a_request_that_takes_too_long_is_ended():
    async def story() -> None:
        source, queue = Silent(), Queue(3)
        queue.take(2)
        watch = Watch(Metrics("m"), [Ask([1], SamplingParams(n=2))], [1])
        run = Run(source, queue, 2, watch, asyncio.get_running_loop().time() + 0.05)
        with pytest.raises(TimeoutError):
            await anext(run)
        run.close()
        run.close()
        assert (source.closed, queue.held) == (1, 0)

    asyncio.run(story())


def test_the_end_lets_running_requests_finish(small: ServerProcess):
    """Last: the server is gone afterwards."""
    body = {**LONG, "max_tokens": 400, "stream": True}
    with small.http.stream("POST", TEXT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        small.process.send_signal(signal.SIGTERM)
        until(lambda: refused(small.url))
        *rest, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert json.loads(rest[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    worker = small.worker
    assert small.process.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def refused(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 503
    except httpx.TransportError:
        return True
