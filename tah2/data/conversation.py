"""Row formats -> one shape: a `Conversation` for the chat template, or `PlainText` without one.

Known rows (column names after `SourceConfig.columns`):

    messages            [{role, content, reasoning_content?, tool_calls?, tool_call_id?}, ...], optional `tools`
    conversations       the same under another name, or ShareGPT's [{from, value}, ...] with an optional `system`
    prompt, completion  two strings, or two lists of messages (the completion alone has a loss)
    text                language modelling

Lists may come as JSON strings (Parquet files often hold them so). Tool-call arguments become mappings, as chat
templates expect; `content` becomes a string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tah2.data.report import BadRow

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    first_supervised: int = 0
    """Messages before this index never have a loss (the prompt of a conversational prompt/completion row)."""


@dataclass(frozen=True)
class PlainText:
    """Text without a template; `prompt` has no loss, `completion` has."""

    prompt: str
    completion: str


def parse_row(row: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Conversation | PlainText:
    """Recognise the format of one row; raises `BadRow` with the reason when there is none."""
    get = _getter(row, columns or {})
    messages = get("messages")
    if messages is not None:
        return _answered(_conversation(messages, get("tools"), get("system")))
    prompt, completion = _text_or_messages(get("prompt")), _text_or_messages(get("completion"))
    if prompt is not None and completion is not None:
        if isinstance(prompt, str) and isinstance(completion, str):
            return PlainText(prompt, completion)
        return _answered(_prompted(prompt, completion, get("tools")))
    text = get("text")
    if isinstance(text, str) and text:
        return PlainText("", text)
    raise BadRow("unknown format", f"needs 'messages', 'prompt' and 'completion', or 'text'; {_columns_of(row)}")


def parse_prompt(row: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Conversation:
    """A row that is to be answered: `messages`, or a `prompt`; answers that it holds already are read too."""
    get = _getter(row, columns or {})
    messages = get("messages")
    if messages is not None:
        return _conversation(messages, get("tools"), get("system"))
    prompt = _text_or_messages(get("prompt"))
    if prompt is None:
        raise BadRow("unknown format", f"needs 'messages' or 'prompt'; {_columns_of(row)}")
    return _prompted(prompt, _text_or_messages(get("completion")), get("tools"))


def row_id(row: Mapping[str, Any], columns: Mapping[str, str], fallback: str) -> str:
    """The row's own id, where it has one."""
    for name in (columns.get("id", "id"), "uuid"):
        value = row.get(name) if name else None
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return str(value)
    return fallback


def without_nulls(value: Any) -> Any:
    """Arrow gives every struct the union of all keys, null where a row has none: take those away again."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(entry) for entry in value]
    return value


def _getter(row: Mapping[str, Any], columns: Mapping[str, str]) -> Callable[[str], Any]:
    """Our column names -> values of the row; messages may also stand under `conversations`."""

    def get(name: str) -> Any:
        value = row.get(columns.get(name, name)) if columns.get(name, name) else None
        return row.get("conversations") if value is None and name == "messages" and name not in columns else value

    return get


def _columns_of(row: Mapping[str, Any]) -> str:
    return f"its columns are {', '.join(sorted(str(key) for key in row)) or 'none'}"


def _conversation(raw: Any, tools: Any, system: Any) -> Conversation:
    messages = _messages(raw)
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(tuple(messages), _tools(tools))


def _prompted(prompt: Any, completion: Any, tools: Any) -> Conversation:
    before = _messages(prompt) if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    after = [] if completion is None else _answer(completion) if isinstance(completion, str) else _messages(completion)
    return Conversation((*before, *after), _tools(tools), len(before))


def _answered(conversation: Conversation) -> Conversation:
    if not any(message["role"] == "assistant" for message in conversation.messages[conversation.first_supervised :]):
        raise BadRow("no assistant message")
    return conversation


def _messages(raw: Any) -> list[Message]:
    raw = _decoded(raw)
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise BadRow("no messages", f"expected a list of messages, not {_short(raw)}")
    return [_message(entry, index) for index, entry in enumerate(raw)]


def _text_or_messages(raw: Any) -> Any:
    """A string that is JSON stays a string unless it holds messages: a prompt may well begin with `[1, 2]`."""
    decoded = _decoded(raw)
    is_messages = isinstance(decoded, list) and decoded and all(isinstance(m, Mapping) for m in decoded)
    return decoded if is_messages and all("role" in m or "from" in m for m in decoded) else raw


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _message(raw: Any, index: int) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRow("malformed message", f"message {index} is {_short(raw)}")
    role = raw.get("role", raw.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown role", f"message {index} has role {_short(role)}")
    message: Message = {"role": ROLES[role], "content": _content(raw.get("content", raw.get("value")), index)}
    reasoning = next((raw[key] for key in REASONING_KEYS if isinstance(raw.get(key), str) and raw[key].strip()), None)
    if reasoning is not None and message["role"] == "assistant":
        message["reasoning_content"] = reasoning
    if raw.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, index) for call in _listed(raw["tool_calls"], index)]
    for key in ("tool_call_id", "name"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    if message["content"] is None:
        if message["role"] == "assistant" and not {"tool_calls", "reasoning_content"} & set(message):
            raise BadRow("empty message", f"message {index} has neither content nor tool calls")
        message["content"] = ""
    return message


def _content(raw: Any, index: int) -> str | None:
    if raw is None or isinstance(raw, str):
        return raw
    if isinstance(raw, Sequence) and all(isinstance(part, Mapping) for part in raw):
        if all(isinstance(part.get("text"), str) for part in raw):
            return "".join(part["text"] for part in raw)
        kinds = sorted({str(part.get("type")) for part in raw})
        raise BadRow("content is not text", f"message {index} has parts of type {', '.join(kinds)}")
    if isinstance(raw, Mapping):  # the result of a tool, as an object
        return json.dumps(raw, ensure_ascii=False)
    raise BadRow("content is not text", f"message {index} has content {_short(raw)}")


def _tool_call(raw: Any, index: int) -> dict[str, Any]:
    call = _decoded(raw)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow("malformed tool call", f"message {index} calls {_short(raw)}")
    arguments = _decoded(function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise BadRow("malformed tool call", f"message {index}: the arguments of {function['name']!r} are not an object")
    clean: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        clean["id"] = call["id"]
    return clean


def _tools(raw: Any) -> tuple[dict[str, Any], ...]:
    raw = _decoded(raw)
    if raw is None or raw == "":
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise BadRow("malformed tools", f"expected a list of tools, not {_short(raw)}")
    tools = [_decoded(tool) for tool in raw]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow("malformed tools", "every tool must be an object")
    return tuple(dict(tool) for tool in tools)


def _listed(raw: Any, index: int) -> Sequence[Any]:
    raw = _decoded(raw)
    if isinstance(raw, Sequence) and not isinstance(raw, str):
        return raw
    raise BadRow("malformed tool call", f"message {index} has tool_calls {_short(raw)}")


def _decoded(raw: Any) -> Any:
    """A JSON list or object written as a string, read; any other value as it is."""
    if isinstance(raw, str) and raw.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(raw)
        except ValueError:
            return raw
    return raw


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
