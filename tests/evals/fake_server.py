"""A small OpenAI-compatible server in this process whose answers are a function of the request, and whose faults are
scripted: `script(body, tried)` returns a `Reply` for the `tried`-th time (from 1) that this very body arrives."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "fake-teacher"


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: Any = None
    """JSON value, or bytes sent as they are; None: the normal answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False
    """Close the connection instead of answering."""


def fluent(body: Mapping[str, Any]) -> str:
    """The normal answer's text: words that depend on the whole request, sampling seed included."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return f"answer {digest[:8]} of seed {body.get('seed')}"


def normal(body: Mapping[str, Any], text: str | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    choices = []
    for index in range(body.get("n", 1)):
        said = fluent(body) + f" choice {index}" * (index > 0) if text is None else text
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": said}
        else:
            choice["text"] = said
        if body.get("return_token_ids"):
            choice["token_ids"] = list(range(len(said.split())))
        if body.get("return_depths"):
            choice["depths"] = [1 + i % 2 for i in range(len(said.split()))]
        choices.append(choice)
    usage = {"prompt_tokens": 5, "completion_tokens": sum(len(fluent(body).split()) for _ in choices)}
    return {"model": MODEL, "choices": choices[::-1], "usage": usage, "prompt_token_ids": [1, 2, 3, 4, 5]}


class FakeServer:
    """`with FakeServer(script) as server:` serves at `server.url`; `server.seen` holds every request's body."""

    def __init__(
        self, script: Callable[[dict[str, Any], int], Reply | None] | None = None, models: tuple[str, ...] = (MODEL,)
    ) -> None:
        self.script, self.models = script or (lambda body, tried: None), models
        self.seen: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.most_at_once = self._at_once = 0
        self._tried: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> FakeServer:
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, body: dict[str, Any]) -> Reply:
        with self._lock:
            name = json.dumps(body, sort_keys=True)
            tried = self._tried[name] = self._tried.get(name, 0) + 1
            self.seen.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        reply = self.script(body, tried) or Reply()
        time.sleep(reply.delay)
        with self._lock:
            self._at_once -= 1
        return reply


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.fake.headers.append(dict(self.headers))
        self._send(Reply(body={"data": [{"id": name} for name in self.fake.models]}))

    def do_POST(self) -> None:
        self.fake.headers.append(dict(self.headers))
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        reply = self.fake.reply(body)
        if reply.drop:
            self.close_connection = True
            return
        self._send(Reply(body=normal(body)) if reply.status == 200 and reply.body is None else reply)

    def _send(self, reply: Reply) -> None:
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body or {}).encode()
        self.send_response(reply.status)
        for name, value in {**reply.headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
