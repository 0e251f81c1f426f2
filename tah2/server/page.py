"""The live page at `/`: a few static files, known by name before the first request.

What a browser may ask for is a fixed table, so no path is ever made from a request. The page needs no API key; what
it asks the API does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI, Request, Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """One file, in memory."""

    body: bytes
    media_type: str
    tag: str

    def answer(self, request: Request) -> Response:
        """The file; nothing but "not modified" if the browser has it already."""
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def assets() -> dict[str, Asset]:
    """The page's files by name."""
    found = {}
    for entry in files("tah2.server").joinpath("static").iterdir():
        suffix = entry.name.rpartition(".")[2]
        if suffix in TYPES:
            body = entry.read_bytes()
            found[entry.name] = Asset(body, TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


def add_page(app: FastAPI) -> None:
    """`/` and `/static/NAME`, left out of the API's description."""
    known = assets()

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return known["index.html"].answer(request)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        asset = known.get(name)
        return Response(status_code=404, headers=HEADERS) if asset is None else asset.answer(request)
