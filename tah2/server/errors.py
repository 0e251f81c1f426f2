"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`, one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from tah2.server.async_engine import NotReady, Refusal
from tah2.server.process import WorkerDied

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
TOO_LONG = "context_length_exceeded"


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str = "is not supported by this server; leave it out") -> ApiError:
    return ApiError(400, f"{param!r} {why}.", param=param, code="unsupported_parameter")


def as_api_error(error: BaseException) -> ApiError:
    """What the client hears of `error`; an unforeseen one says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refusal):
        return invalid(str(error))
    if isinstance(error, WorkerDied):
        return ApiError(503, str(error), code="worker_died", headers={"Retry-After": "1"})
    if isinstance(error, NotReady):
        return ApiError(503, str(error), code="not_ready", headers={"Retry-After": "5"})
    if isinstance(error, TimeoutError):
        return ApiError(504, "The request took longer than this server allows.", code="timeout")
    return ApiError(500, "The server made a mistake; its log has the request's id.", code="internal_error")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first complaint about a body, with the path of the field that it is about."""
    first = errors[0]
    place = [part for part in first["loc"] if not (isinstance(part, str) and part.startswith(("function-", "tagged-")))]
    name = ""
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    if first["type"] == "json_invalid":
        return invalid(f"The body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    message = str(first["msg"]).removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else None
    return invalid(f"{name}: {message}." if name else f"{message}.", name or None, code)


def install(app: FastAPI) -> None:
    """Make `app` answer every foreseen error in this form; the door does it with the others."""

    async def known(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, f"{error.detail}.", headers=error.headers).response()

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, (ValidationError, RequestValidationError))
        return of_validation(error.errors()).response()

    for kind in (ApiError, Refusal, WorkerDied, NotReady, TimeoutError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ValidationError, validation)
    app.add_exception_handler(RequestValidationError, validation)
