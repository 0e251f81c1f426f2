"""What every request passes: an id, the key, the size of its body, and a line in the log when it is over."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tah2.server.config import ServerConfig
from tah2.server.errors import ApiError, as_api_error

log = logging.getLogger("tah2.server")
access = logging.getLogger("tah2.server.access")

CLIENT_LEFT = 499
"""The status of a request whose client left before an answer began; only the log sees it."""

SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
OPEN_PATHS = ("/", "/health", "/ready")
"""Answered without a key, as is everything below /static/."""
NOTES = "notes"
"""Where routes leave what the log should say of a request (counts, never content)."""


class Keys:
    """Whether a key is one of ours, in a time that says nothing about how close it came."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def fits(self, given: str) -> bool:
        digest = _digest(given)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # looks at all of them


class Door:
    """The outermost ASGI layer."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app, self.config, self.keys = app, config, Keys(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), time.monotonic()
        name = _request_id(headers.get("x-request-id"))
        notes: dict[str, Any] = {}
        scope.setdefault("state", {}).update({"request_id": name, NOTES: notes})
        status = CLIENT_LEFT
        left = self.config.max_body_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    raise self._too_large()
            return message

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await refusal.response()(scope, receive, named)
            else:
                await self.app(scope, counted, named)
        except Exception as error:
            log.exception("a request failed", extra={"fields": {"request_id": name}})
            if status != CLIENT_LEFT:  # the answer has begun, so nothing better can be said
                raise
            await as_api_error(error).response()(scope, receive, named)
        finally:
            access.info("request", extra={"fields": {**_line(scope, name, status, started), **notes}})

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > self.config.max_body_bytes:
            return self._too_large()
        if not self._called_by_its_name(headers.get("host", "")):
            message = "This server answers to this machine's own names; --allow-host NAME lets it answer to others."
            return ApiError(403, message, code="host_not_allowed")
        path = scope["path"]
        if not self.keys or path in OPEN_PATHS or path.startswith("/static/"):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.keys.fits(key.strip()):
            return None
        message = "This server needs a key: send the header 'Authorization: Bearer KEY' with a valid one."
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _called_by_its_name(self, host: str) -> bool:
        """A page of another origin can point its own name at a loopback address; its requests still carry the name."""
        if self.keys or not _is_loopback(self.config.host) or not host:
            return True
        name = _without_port(host).lower()
        return name in self.config.allow_hosts or _is_loopback(name)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self.config.max_body_bytes} bytes.", code="body_too_large")


def _without_port(host: str) -> str:
    """`[::1]:8000` and `localhost:8000` as `::1` and `localhost`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _request_id(given: str | None) -> str:
    return given if given is not None and SAFE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def _line(scope: Scope, name: str, status: int, started: float) -> dict[str, Any]:
    route = getattr(scope.get("route"), "path", None)
    return {
        "request_id": name,
        "method": scope["method"],
        "route": route or "(none)",
        "status": status,
        "seconds": round(time.monotonic() - started, 4),
    }
