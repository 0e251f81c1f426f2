"""For whoever runs the server: is it alive, is it ready, what is it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tah2 import __version__
from tah2.server.errors import ApiError
from tah2.server.service import service_of

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 while a worker runs, 503 while one is being restarted."""
    if not service_of(request).engine.ready:
        raise ApiError(503, "The worker is not running; a new one is being started.", code="not_ready")
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """200 while new requests are taken."""
    service = service_of(request)
    if not service.engine.ready or service.draining:
        raise ApiError(503, "New requests are not taken at the moment.", code="not_ready")
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """In Prometheus' text form."""
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}
