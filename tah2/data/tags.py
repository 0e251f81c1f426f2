"""What kind of token a procedural task wrote, and how many serial steps it takes to predict it."""

from __future__ import annotations

PROMPT, FILLER, RULE, COPY, MARK, ANSWER, END = range(7)
KINDS = ("prompt", "filler", "rule", "copy", "mark", "answer", "end")
HOP = 100
"""The tag of a token that takes k serial steps is HOP + k; other tags index `KINDS`."""


def tag_name(tag: int) -> str:
    """`hop 2`, `filler`, ...: the tag for tables."""
    return f"hop {tag - HOP}" if tag >= HOP else KINDS[tag]
