"""Bodies in, answers and event streams out; a client that leaves ends its work at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tah2.server.door import CLIENT_LEFT, NOTES
from tah2.server.errors import ApiError, as_api_error, invalid, of_validation
from tah2.server.service import service_of

log = logging.getLogger("tah2.server")

Body = TypeVar("Body", bound=BaseModel)
Value = TypeVar("Value")

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client has closed the connection."""


async def read(request: Request, kind: type[Body]) -> Body:
    """The request's body as `kind`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, "Send the body as JSON, with the header 'Content-Type: application/json'.")
    config = service_of(request).config
    try:
        async with asyncio.timeout(config.body_timeout):
            body = await request.body()
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {config.body_timeout:g} seconds.") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_LEFT, "The client left before its request was whole.") from None
    try:
        read = kind.model_validate_json(body)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False, include_input=False)) from None
    if config.log_content:
        log.info("body", extra={"fields": {"request_id": request.state.request_id, "body": body.decode()}})
    return read


def note(request: Request, **facts: Any) -> None:
    """What the log's line about the request should say besides; never content."""
    getattr(request.state, NOTES).update(facts)


def answer(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """The value of `work`, which is cancelled when the client leaves."""
    return await _race(request.receive, work)


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


class EventStream(Response):
    """Server-sent events; an error in their making becomes the last one. `close` is called in any case.

    A client that takes nothing for `stall` seconds has left.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], stall: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.close, self.stall = events, close, stall
        self.request_id: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_id = scope.get("state", {}).get("request_id")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(Gone):
                await _race(receive, self._send(send))
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        try:
            async for data in self.events:
                await self._write(send, data)
        except Gone:
            raise
        except Exception as error:
            problem = as_api_error(error)
            if problem.code == "internal_error":
                log.exception("an event stream failed", extra={"fields": {"request_id": self.request_id}})
            await self._write(send, event(problem.body) + DONE)
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self.stall):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise Gone from None


async def _race(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value:
    """Run `work`; raises Gone, with `work` cancelled, if the client leaves first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Gone
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


async def _left(receive: Receive) -> None:
    with suppress(ClientDisconnect):
        while (await receive())["type"] != "http.disconnect":
            pass


def check(condition: bool, message: str, param: str | None = None) -> None:
    if not condition:
        raise invalid(message, param)
