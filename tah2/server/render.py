"""From messages to token ids, through the tokenizer's chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tah2.server.errors import TOO_LONG, ApiError, invalid
from tah2.server.guard import Guard, encode, unused
from tah2.server.hermes import knows_tools, spelled
from tah2.server.marks import END_THINK, THINK
from tah2.server.protocol.requests import ChatFields, Message

PROBED = 8
"""Characters per token of the context that are encoded to see whether a long text fits; ordinary text has 3 to 5."""


@dataclass(frozen=True)
class Prompt:
    """What the model reads."""

    ids: list[int]
    text: str
    """As rendered."""

    @property
    def thinks(self) -> bool:
        """The answer begins inside a block of reasoning."""
        return self.text.rstrip().endswith(THINK)

    @property
    def thought(self) -> bool:
        """The block of reasoning is closed already."""
        return self.text.rstrip().endswith(END_THINK)


class Renderer:
    def __init__(self, tokenizer: Any, template: str | None = None, context: int | None = None) -> None:
        self.tokenizer, self.template, self.context = tokenizer, template, context
        self._longest = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token."""
        self._guard = Guard(tokenizer)
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}

    @property
    def source(self) -> str:
        """The template's text; empty if there is none."""
        found = self.template or self.tokenizer.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    def text(self, text: str, special: bool = True) -> list[int]:
        """A raw prompt: here control tokens may be spelled out."""
        with _refused():
            return encode(self.tokenizer, text, special)

    def bound(self, text: str, param: str, whole: bool = True) -> None:
        """Refuse what cannot fit the context before all of it is encoded; `whole`: nothing will be cut off."""
        if self.context is None:
            return
        if len(text) > self._longest * self.context or (whole and self._overflows(text, self.context)):
            message = f"The text has {len(text)} characters; this model's context of {self.context} tokens holds less."
            raise invalid(message, param, TOO_LONG)

    def _overflows(self, text: str, context: int) -> bool:
        """A long text's beginning alone is too long; a cut through a word changes a few tokens at most."""
        beginning = text[: PROBED * context]
        return len(beginning) < len(text) and len(self.text(beginning, special=False)) > context + PROBED

    def chat(self, asked: ChatFields, tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> Prompt:
        """The prompt of a conversation; a mistake in it is an ApiError."""
        if not self.source:
            raise invalid("The model's tokenizer has no chat template; use /v1/completions or --chat-template.")
        if (
            asked.continue_final_message
            and asked.add_generation_prompt
            and "add_generation_prompt" in asked.model_fields_set
        ):
            raise invalid("Either continue the final message or add a generation prompt.", "continue_final_message")
        arguments = {**extra, **(asked.chat_template_kwargs or {})}
        for name in arguments:
            if name in self._reserved:
                raise invalid(f"{name!r} cannot be set in 'chat_template_kwargs'.", "chat_template_kwargs")
        messages = [_plain(message, place) for place, message in enumerate(asked.messages)]
        with _refused("messages"):
            cut = unused([messages, tools, arguments])
        guarded = self._guard.turns(messages, cut)
        offered = self._guard.spell(list(tools), cut)
        if not knows_tools(self.source):
            guarded, offered = spelled(guarded, offered), []
        rendered = self._render(
            guarded,
            offered or None,
            self._guard.spell(arguments, cut),
            bool(asked.add_generation_prompt) and not asked.continue_final_message,
            bool(asked.continue_final_message),
        )
        self.bound(rendered, "messages", getattr(asked, "truncate_prompt_tokens", None) is None)
        with _refused("messages"):
            ids = self._guard.encode(rendered, cut, special=bool(asked.add_special_tokens))
        return Prompt(ids, rendered.replace(cut, ""))

    def _render(self, messages: Any, tools: Any, arguments: Any, answer: bool, goes_on: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=answer,
                continue_final_message=goes_on,
                **arguments,
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise _template_error(error) from None
        except (RecursionError, MemoryError) as error:
            raise _template_error(error) from None
        return text


def _plain(message: Message, place: int) -> dict[str, Any]:
    """The message as templates expect it: content is text, a call's arguments are a mapping."""
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, place),
    }
    thoughts = message.reasoning_content or message.reasoning
    if thoughts is not None:
        made["reasoning_content"] = thoughts
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    return made


def _text(message: Message, place: int) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise invalid(f"A message of the role {message.role!r} needs content.", f"messages[{place}].content")
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal") or part.text is None:
            where = f"messages[{place}].content"
            raise invalid(f"A part of the type {part.type!r} cannot be read; this model reads text.", where)
        texts.append(part.text)
    return "\n".join(texts)


def _arguments(given: str | dict[str, Any]) -> Any:
    """A mapping where it is one: templates write it themselves."""
    if not isinstance(given, str):
        return given
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return read if isinstance(read, dict) else given


@contextmanager
def _refused(param: str | None = None) -> Iterator[None]:
    """What cannot be encoded is an error of the request."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error), param) from None


def _template_error(error: BaseException) -> ApiError:
    said = " ".join(str(error).split()) or type(error).__name__
    return invalid(f"The chat template cannot render these messages: {said[:300]}.", "messages")
