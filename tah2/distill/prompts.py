"""Rows of the sources -> prompts: cut behind the last user message, without repetitions.

What stands before the cut is given to the teacher as it is, earlier assistant turns included; what stands behind it
is the recorded answer, of which only the tool results are of use (see `tah2.distill.episode`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tah2.data.config import SourceConfig
from tah2.data.conversation import Conversation, Message, parse_prompt, row_id
from tah2.data.report import BadRow
from tah2.data.sources import RawRow, Source, open_source

Place = tuple[int, int]
"""(source, row): where a prompt stands in the sources of a run."""


@dataclass(frozen=True)
class Prompt:
    key: str
    """A digest of what is asked; two prompts that ask the same have the same one."""
    messages: tuple[Message, ...]
    """Up to the last user message."""
    recorded: tuple[Message, ...]
    """The messages behind it."""
    tools: tuple[dict[str, Any], ...]
    id: str
    source: str
    where: str
    row: Mapping[str, Any] = field(repr=False)

    @property
    def asked(self) -> list[str]:
        """All that users and systems say, for comparisons with benchmarks."""
        return [str(message["content"]) for message in self.messages if message["role"] in ("user", "system")]


class PromptReader:
    """The sources of a run, opened once and read as often as needed, in the same order."""

    def __init__(self, sources: Sequence[SourceConfig]) -> None:
        self.sources: list[Source] = [open_source(source) for source in sources]

    def rows(self) -> Iterator[tuple[Place, SourceConfig, RawRow]]:
        """Every row, undecoded."""
        for index, source in enumerate(self.sources):
            for raw in source.rows():
                yield (index, raw.number), source.config, raw

    def selected(self, places: Mapping[Place, Any]) -> Iterator[Prompt]:
        """The prompts at `places`, in the order of the sources; other rows are skipped without decoding them."""
        for place, source, raw in self.rows():
            if place in places:
                yield read_prompt(source, raw)


def read_prompt(source: SourceConfig, raw: RawRow) -> Prompt:
    """The prompt of one row; raises `BadRow` where there is none."""
    row = raw.load()
    conversation = parse_prompt(row, source.columns)
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "user"]
    if not turns:
        raise BadRow("no user message")
    messages, recorded = conversation.messages[: turns[-1] + 1], conversation.messages[turns[-1] + 1 :]
    if not str(messages[-1]["content"]).strip():
        raise BadRow("empty prompt")
    key = prompt_key(Conversation(messages, conversation.tools))
    name = row_id(row, source.columns, key)
    return Prompt(key, messages, recorded, conversation.tools, name, source.label, raw.where, row)


def prompt_key(conversation: Conversation) -> str:
    """The same for prompts that differ in white space, hidden reasoning and the ids of tool calls alone."""
    spoken = [
        [
            message["role"],
            " ".join(str(message["content"]).split()),
            [c["function"] for c in message.get("tool_calls", ())],
        ]
        for message in conversation.messages
    ]
    text = json.dumps([spoken, conversation.tools], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
