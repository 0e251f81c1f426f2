"""From a response to the program in it. Runs inside: even parsing what a model wrote can exhaust a process."""

from __future__ import annotations

import ast
import re

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
STATEMENT = re.compile(r"^(?:import |from |def |class |@|async def )", re.MULTILINE)


def code_blocks(text: str) -> list[str]:
    """Every fenced block that may hold Python; one that the output limit has cut counts to its end."""
    return [body for language, body in FENCE.findall(text) if language.lower() in ("", "python", "python3", "py")]


def function_source(response: str, name: str, prompt: str = "") -> str:
    """The program that defines `name`: the last block that does, else the bare response, else `prompt` continued."""
    text = response.rsplit("</think>", 1)[-1]
    blocks = code_blocks(text)
    for block in reversed(blocks):
        if defines(block, name):
            return block
    if not blocks and defines(text, name):
        return parsable_part(text)
    if not prompt:
        return blocks[-1] if blocks else text
    continued = prompt + text.split("\n```", 1)[0]
    return prompt + blocks[-1] if blocks and not parses(continued) else continued


def whole_program(response: str) -> str:
    """The last block; a bare response as far as it is a program, up to a fence that closes what the prompt opened."""
    text = response.rsplit("</think>", 1)[-1]
    blocks = code_blocks(text)
    if blocks and (text.lstrip().startswith("```") or not _opened_by_prompt(text)):
        return blocks[-1]
    return text.split("```", 1)[0]


def _opened_by_prompt(text: str) -> bool:
    """Whether the first fence closes a block that began before the response: what precedes it is Python."""
    before = text.split("```", 1)[0]
    return text.count("```") % 2 == 1 and bool(before.strip()) and parses(before)


def defines(text: str, name: str) -> bool:
    return re.search(rf"^(?:async )?def {re.escape(name)}\b|^{re.escape(name)}\s*=", text, re.MULTILINE) is not None


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def parsable_part(text: str) -> str:
    """`text` less the prose before its first statement and after its last: the longest part that is Python."""
    if parses(text):
        return text
    first = STATEMENT.search(text)
    lines = text[first.start() :].split("\n") if first else []
    for end in range(len(lines), max(0, len(lines) - 200), -1):
        candidate = "\n".join(lines[:end])
        if parses(candidate):
            return candidate
    return text
