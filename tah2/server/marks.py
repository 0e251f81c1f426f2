"""How Qwen3 and its relatives mark reasoning and tool calls in their text."""

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESULT, END_RESULT = "<tool_response>", "</tool_response>"


def partial_end(text: str, mark: str) -> int:
    """How many letters at the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
