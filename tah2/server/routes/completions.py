"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from tah2.server.chat import Chat
from tah2.server.completions import Completions
from tah2.server.door import CLIENT_LEFT
from tah2.server.protocol.answers import ChatCompletion, Completion
from tah2.server.protocol.requests import ChatRequest, CompletionRequest
from tah2.server.routes.schema import described
from tah2.server.service import Run, service_of
from tah2.server.transport import EventStream, Gone, answer, note, read, unless_gone

router = APIRouter(prefix="/v1", tags=["inference"])


@router.post("/chat/completions", openapi_extra=described(ChatRequest, ChatCompletion, streams=True))
async def chat(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    asked = await read(request, ChatRequest)
    made = await asyncio.to_thread(Chat, service_of(request), asked)
    run = await service_of(request).start([made.ask])
    return await _respond(request, made, run, bool(asked.stream))


@router.post("/completions", openapi_extra=described(CompletionRequest, Completion, streams=True))
async def completions(request: Request) -> Response:
    """Continue prompts, at once or as a stream."""
    asked = await read(request, CompletionRequest)
    made = await asyncio.to_thread(Completions, service_of(request), asked)
    run = await service_of(request).start(made.asks)
    return await _respond(request, made, run, bool(asked.stream))


async def _respond(request: Request, made: Chat | Completions, run: Run, stream: bool) -> Response:
    def close() -> None:
        run.close()
        note(request, stream=stream, **made.tally.notes)

    if stream:
        return EventStream(made.stream(run), close, service_of(request).config.stall_timeout)
    try:
        return answer(await unless_gone(request, made.complete(run)))
    except Gone:
        return Response(status_code=CLIENT_LEFT)
    finally:
        close()
