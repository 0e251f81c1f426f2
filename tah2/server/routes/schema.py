"""The OpenAPI description of routes that read and write their bodies themselves."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel

from tah2.server.protocol.answers import Problem

REFERENCE = "#/components/schemas/"
ERRORS = {
    "400": "The request cannot be done as it stands; the error names the field",
    "401": "No valid API key",
    "404": "No such model",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "The queue is full; Retry-After says when to come back",
    "503": "The model is being loaded again",
    "504": "The request took too long",
}


def described(
    body: type[BaseModel] | None, answer: type[msgspec.Struct], *, streams: bool = False, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`openapi_extra` of a route; its schemas come from `components`. `also`: errors of a route without body."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REFERENCE + answer.__name__}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    problem = {"application/json": {"schema": {"$ref": REFERENCE + "Problem"}}}
    _USED.add(answer)
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    responses |= {status: {"description": text, "content": problem} for status, text in ERRORS.items()}
    if body is None:
        return {"responses": {status: responses[status] for status in ("200", "401", *also)}}
    _BODIES.add(body)
    reference = {"application/json": {"schema": {"$ref": REFERENCE + body.__name__}}}
    return {"requestBody": {"required": True, "content": reference}, "responses": responses}


def components() -> dict[str, Any]:
    """JSON schemas of all bodies and answers that `described` has named."""
    _, found = msgspec.json.schema_components([Problem, *_USED], ref_template=REFERENCE + "{name}")
    schemas: dict[str, Any] = dict(found)
    for body in _BODIES:
        schema = body.model_json_schema(ref_template=REFERENCE + "{model}", by_alias=True)
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
    return schemas


_USED: set[type[msgspec.Struct]] = set()
_BODIES: set[type[BaseModel]] = set()
