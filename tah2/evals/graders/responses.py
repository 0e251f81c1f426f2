"""Reading a response: what follows the thinking, the boxed answer, the letter. No library, nothing is evaluated."""

from __future__ import annotations

import re

END_OF_THINKING = "</think>"
BOXED = "\\boxed"


def after_thinking(response: str) -> str:
    """Only what follows the thinking is an answer; a response without the mark is all answer."""
    return response.rsplit(END_OF_THINKING, 1)[-1]


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...}, braces balanced."""
    start = text.rfind(BOXED)
    while start >= 0:
        content = braced(text[start + len(BOXED) :].lstrip())
        if content is not None:
            return content
        start = text.rfind(BOXED, 0, start)
    return None


def braced(text: str) -> str | None:
    """What stands between the brace that begins `text` and its partner."""
    if not text.startswith("{"):
        return None
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:place]
    return None


def clean_gold(gold: str) -> str:
    """Without dollars and the final full stop: gold answers are wrapped in \\boxed{}, where these do harm."""
    return gold.replace("$", "").strip().rstrip(".").strip()


def same_words(text: str, other: str) -> bool:
    """Equal but for white space, dollars, LaTeX spacing and case: how answers that are sentences are compared."""
    return _words(text) == _words(other) != ""


def _words(text: str) -> str:
    plain = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}", r"\1", clean_gold(text))
    plain = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]|~", "", plain)
    return re.sub(r"\s+", "", plain).casefold()


def chosen_letter(response: str, letters: str) -> str | None:
    """The letter that a response settles on: in its last \\boxed{}, else after its last "answer"."""
    text = after_thinking(response)
    letter = rf"(?:\\[a-z]+\s*\{{)?\W*([{letters}])(?![A-Za-z])"
    boxed = rf"\\boxed\{{\s*{letter}"
    link = r"(?:\W*(?i:is)\b|\s*[*_]*\s*[:=])"
    stated = rf"(?i:answer){link}\W*{letter}"
    alone = rf"(?i:answer)\W+([{letters}])\W*$"
    for pattern in (boxed, stated, alone):
        found = re.findall(pattern, text, re.MULTILINE)
        if found:
            return str(found[-1])
    return None
