"""Conversation -> token ids and a loss mask, through the model's own chat template.

The ids are exactly those of `apply_chat_template` on the whole conversation. Which of them have a loss:

- Templates with `{% generation %}` marks say so themselves.
- Others are rendered turn by turn. With F the whole text, P_i the text of the messages before turn i plus the
  generation prompt and E_i the text up to and including turn i, a turn is *stable* when P_i begins E_i and E_i
  begins F. Its response is then F[len(P_i):len(E_i)]: exactly what the model would have been asked to write.

Qwen3's template drops the reasoning of assistant turns before the last user message, and puts an empty think block
before a last answer without reasoning. Hence, by choice:

- A turn that is not stable stays as context without a loss, and is counted. With Qwen3 that leaves the turns after
  the last user message: the whole last run of tool calls and answer. Training on the rewritten earlier turns would
  teach the model not to think.
- An empty think block that the template adds by itself is context: the data never asked the model to write it. A turn
  without reasoning is stable too when it only loses that block as history.
- A response ends with its end-of-turn token; the line break that follows it is never generated, so it has no loss.
- A token that straddles the start of a response is context.

A template whose last turn is not stable cannot be used, and is refused with one sentence before anything is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError
from tah2.data.config import TrainOn
from tah2.data.conversation import Conversation, Message, PlainText
from tah2.data.report import BadRow
from tah2.data.store import Sample

Span = tuple[int, int]

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")
EMPTY_THINK_AT_END = re.compile(EMPTY_THINK.pattern + r"\Z")


@dataclass(frozen=True)
class Rendered:
    """A sample and what the report should know of it."""

    sample: Sample
    rewritten_turns: int = 0
    trimmed: bool = False
    has_control_tokens: bool = False


class Renderer:
    """Turns parsed rows into samples with one tokenizer and one chat template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        train_on: TrainOn = "assistant",
        chat_template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError("The data pipeline needs a fast tokenizer (one that reports character offsets).")
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.arguments = dict(template_arguments or {})
        self.template = chat_template if chat_template is not None else _default_template(tokenizer)
        self.has_marks = bool(MARK.search(self.template or ""))
        self.reads_reasoning = "reasoning_content" in (self.template or "")
        self.control_tokens = [token for token in tokenizer.all_special_tokens if token]
        self._checked = False

    def render(self, row: Conversation | PlainText, name: str = "") -> Rendered:
        """The sample of one row, whatever its length; raises `BadRow` when the template cannot render it."""
        if isinstance(row, PlainText):
            return self._render_plain(row, name)
        self.check_template()
        messages, trimmed = list(row.messages), False
        if self.train_on != "all":
            end = max(i for i, message in enumerate(messages) if message["role"] == "assistant") + 1
            messages, trimmed = messages[:end], end < len(messages)
        messages = messages if self.reads_reasoning else [inline_reasoning(message) for message in messages]
        tools = list(row.tools)
        if self.has_marks and self.train_on != "all":
            ids, mask = self._render_marked(messages, tools, row.first_supervised)
            rewritten = 0
        else:
            text = self.text(messages, tools)
            spans, rewritten = self._spans(text, messages, tools, row.first_supervised)
            ids, mask = self.encode_spans(text, spans)
        mask[:1] = False  # nothing predicts the first token of a document
        has_control = any(token in str(m["content"]) for m in messages for token in self.control_tokens)
        return Rendered(Sample(ids, mask, name), rewritten, trimmed, has_control)

    def text(self, messages: Sequence[Message], tools: Sequence[Any], prompt: bool = False) -> str:
        """The template's text of `messages`, with the generation prompt where `prompt`."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.arguments,
            )
        except Exception as error:  # templates raise whatever Jinja makes of them
            raise BadRow("the chat template refuses it", _first_line(error)) from error
        return str(text)

    def check_template(self) -> None:
        """Refuse a missing or unusable template once, with a conversation that any template can render."""
        if self._checked:
            return
        if not self.template:
            raise ConfigError("The tokenizer has no chat template: name one in the data setting 'chat_template'.")
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            before, whole = self.text(probe[:1], [], prompt=True), self.text(probe, [])
        except BadRow as problem:
            raise ConfigError(f"The chat template cannot render a question and its answer ({problem}).") from problem
        if not self.has_marks and not (whole.startswith(before) and "b" in whole[len(before) :]):
            raise ConfigError(
                "The chat template is not prefix-consistent: a conversation does not begin with its own generation "
                "prompt, so assistant tokens cannot be told apart; add {% generation %} marks to the template."
            )
        self._checked = True

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids of `text` and a mask of the tokens that lie in `spans` (characters), by one tokenisation."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"], np.int32)
        starts = token_starts(encoded["offset_mapping"])
        mask = np.zeros(len(ids), np.bool_)
        for start, end in spans:
            mask |= (starts >= start) & (starts < end)
        return ids, mask

    def encode_prefixes(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The plain twin of `encode_spans`: tokenise the text up to every cut; no token may cross a cut."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        mask = np.zeros(len(ids), np.bool_)
        for span in spans:
            before, upto = (self.tokenizer(text[:cut], add_special_tokens=False)["input_ids"] for cut in span)
            if ids[: len(before)] != before or ids[: len(upto)] != upto:
                raise ValueError("A token crosses the border of a response.")
            mask[len(before) : len(upto)] = True
        return np.asarray(ids, np.int32), mask

    def _spans(self, text: str, messages: list[Message], tools: list[Any], first: int) -> tuple[list[Span], int]:
        """Characters with a loss, and how many turns wanted one but are rewritten later in the conversation."""
        if self.train_on == "all":
            return [(0, len(text))], 0
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        turns = turns[-1:] if self.train_on == "last_assistant" else turns
        spans = [self._span(text, messages, tools, turn) for turn in turns]
        return [span for span in spans if span is not None and span[0] < span[1]], spans.count(None)

    def _span(self, text: str, messages: list[Message], tools: list[Any], turn: int) -> Span | None:
        """The characters of `text` that are the response of one turn, or None where it is not stable."""
        message, is_last = messages[turn], turn == len(messages) - 1
        before = self.text(messages[:turn], tools, prompt=True) if turn else ""
        upto = text if is_last else self.text(messages[: turn + 1], tools)
        reasons = "<think>" in message["content"] or "reasoning_content" in message
        before = before if reasons else EMPTY_THINK_AT_END.sub("", before)
        if not upto.startswith(before):
            return None
        start = len(before)
        empty = None if reasons else EMPTY_THINK.match(upto, start)
        if empty and text.startswith(upto):
            start = empty.end()
        elif empty:
            upto = before + upto[empty.end() :]
        if not text.startswith(upto):
            return None
        body = upto[start:].rstrip()
        closed = any(body.endswith(token) for token in self.control_tokens)
        return start, start + len(body) if closed else len(upto)

    def _render_marked(
        self, messages: list[Message], tools: list[Any], first: int
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self.arguments,
            )
        except Exception as error:
            raise BadRow("the chat template refuses it", _first_line(error)) from error
        ids = np.asarray(encoded["input_ids"], np.int32)
        mask = np.asarray(encoded["assistant_masks"], np.bool_)
        if first == 0 and self.train_on == "assistant":
            return ids, mask
        # The marked runs are the assistant turns in order; keep those that are wanted.
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        if len(begins) != len(turns):
            raise BadRow("marked turns do not match", f"{len(begins)} marked runs for {len(turns)} assistant turns")
        wanted = [turn >= first for turn in turns]
        keep = wanted.index(True) if self.train_on == "assistant" else len(turns) - 1
        mask[: begins[keep]] = False
        return ids, mask

    def _render_plain(self, row: PlainText, name: str) -> Rendered:
        text = row.prompt + row.completion
        encoded = self.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        ids = list(encoded["input_ids"])
        added = np.asarray(encoded["special_tokens_mask"], np.bool_)
        mask = token_starts(encoded["offset_mapping"]) >= (0 if self.train_on == "all" else len(row.prompt))
        mask &= ~added | np.isin(ids, [self.tokenizer.eos_token_id])
        if self.tokenizer.eos_token_id is not None and (not ids or ids[-1] != self.tokenizer.eos_token_id):
            ids.append(self.tokenizer.eos_token_id)
            mask = np.append(mask, True)
        mask[:1] = False
        has_control = any(token in text for token in self.control_tokens)
        return Rendered(Sample(np.asarray(ids, np.int32), mask, name), has_control_tokens=has_control)

    def fingerprint(self) -> str:
        """Everything that decides how a row becomes ids, as text for a cache key."""
        backend = self.tokenizer.backend_tokenizer.to_str()
        special = {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()}
        return json.dumps([backend, special, self.template, self.arguments, self.train_on], sort_keys=True, default=str)


def token_starts(offsets: Sequence[Span]) -> NDArray[np.int64]:
    """The character where each token begins, int64 `[n]`.

    Byte-level tokenizers may trim a leading space from a token's offsets, so a token begins no later than the
    previous one ends; the bytes of one character may be several tokens, which share its offsets.
    """
    if not len(offsets):
        return np.zeros(0, np.int64)
    array = np.asarray(offsets, np.int64)
    starts = array[:, 0].copy()
    starts[1:] = np.minimum(starts[1:], np.maximum.accumulate(array[:-1, 1]))
    return starts


def inline_reasoning(message: Message) -> Message:
    """For templates that know no `reasoning_content`: the reasoning becomes a think block of the content."""
    if "reasoning_content" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    reasoning = str(message["reasoning_content"]).strip("\n")
    return {**rest, "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}


def _default_template(tokenizer: Any) -> str | None:
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return None
    return str(template)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
