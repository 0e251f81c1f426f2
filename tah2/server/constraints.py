"""What an answer is held to: a JSON schema, any JSON object, or calls of the tools that must be called.

Where the model may think first, the block of reasoning is part of the grammar, and what follows it is constrained.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from tah2.engine.params import StructuredOutputsParams
from tah2.server.errors import invalid
from tah2.server.marks import CLOSE, END_THINK, OPEN, THINK
from tah2.server.protocol.requests import ChatRequest, NamedTool, ResponseFormat, Tool
from tah2.server.render import Prompt

BLANKS = {"whitespace_pattern": "[ \\t]?(\\n[ \\t]{0,24})?"}
"""Pretty printing fits; endless blanks, which weak models fall into, do not."""
ONE_LINE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""How Qwen3 writes calls."""
MOST_CALLS = 16
"""Of one answer that must call tools: weak models do not stop by themselves."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def schema_of(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema that `response_format` asks for."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise invalid(
            "'response_format' of the type 'json_schema' needs 'json_schema' with a 'schema'.", "response_format"
        )
    return wanted.json_schema.schema_


def required_tools(request: ChatRequest) -> list[Tool]:
    """The tools of which one must be called; empty if the model is free."""
    tools, choice = request.tools or [], request.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise invalid("'tool_choice' needs 'tools'.", "tool_choice")
    if not isinstance(choice, NamedTool):
        return tools
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise invalid(f"'tool_choice' names {choice.function.name!r}, which is not in 'tools'.", "tool_choice")
    return named[:1]


def constraint(
    request: ChatRequest, prompt: Prompt, thinks: bool, added: Collection[str]
) -> StructuredOutputsParams | None:
    """The constraint on a chat's answer; `added` are the tokens that the tokenizer has beside its plain pieces."""
    given, schema, tools = request.structured(), schema_of(request.response_format), required_tools(request)
    if (given is not None) + (schema is not None) + bool(tools) > 1:
        raise invalid("Give one constraint on the output, not several.", "response_format")
    if given is not None:
        return given
    if tools:
        several = not isinstance(request.tool_choice, NamedTool) and request.parallel_tool_calls is not False
        return StructuredOutputsParams(grammar=_thoughts(prompt, thinks, added) + _calls(tools, several, added))
    if schema is None:
        return None
    before, schema = _thoughts(prompt, thinks, added), spaced(schema)
    if before == "start: body\n":
        return StructuredOutputsParams(json=schema)
    return StructuredOutputsParams(grammar=f"{before}body: %json {json.dumps(schema)}\n")


def spaced(schema: Mapping[str, Any], blanks: Mapping[str, Any] = BLANKS) -> dict[str, Any]:
    """`schema` with rules for blanks, unless it has its own."""
    return {"x-guidance": blanks, **schema}


def _thoughts(prompt: Prompt, thinks: bool, added: Collection[str]) -> str:
    """The grammar's start: reasoning where the model may reason, then `body`."""
    if not thinks or prompt.thought:
        return "start: body\n"
    block = f"/(?s:.*)/ {_tag(END_THINK, added)} /[ \\n]{{0,4}}/"
    if prompt.thinks:
        return f"start: {block} body\n"
    return f"start: thoughts? body\nthoughts: {_tag(THINK, added)} {block}\n"


def _calls(tools: list[Tool], several: bool, added: Collection[str]) -> str:
    bodies = [_call_schema(tool) for tool in tools]
    schema = spaced(bodies[0] if len(bodies) == 1 else {"anyOf": bodies}, ONE_LINE)
    more = f' ("\\n" call){{0,{MOST_CALLS - 1}}}' if several else ""
    call = f'{_tag(OPEN, added)} "\\n" object "\\n" {_tag(CLOSE, added)}'
    return f"body: call{more}\ncall: {call}\nobject: %json {json.dumps(schema)}\n"


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": tool.function.parameters or ANY_OBJECT,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _tag(name: str, added: Collection[str]) -> str:
    """A mark in a grammar: by its token's name where it is one token."""
    return name if name in added else json.dumps(name)
