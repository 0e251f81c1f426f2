"""Tools for chat templates that know none: written into the messages, in the form that `toolcalls` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tah2.server.marks import CLOSE, END_RESULT, OPEN, RESULT

INTRODUCTION = """\
You can call these functions; each is given as JSON:
{functions}
To call one, write nothing but an object with its name and its arguments, between marks:
{open}
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
{close}"""


def knows_tools(template: str) -> bool:
    return "tools" in template


def spelled(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the tools in a system message, calls in what the assistant said, results in what users said."""
    told = [_told(message) for message in messages]
    if not tools:
        return told
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = INTRODUCTION.format(functions=functions, open=OPEN, close=CLOSE)
    if told and told[0]["role"] == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{introduction}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": introduction}, *told]


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"{RESULT}\n{message['content']}\n{END_RESULT}"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return dict(message)
    texts = [f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}" for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([text for text in (message["content"], *texts) if text])}
