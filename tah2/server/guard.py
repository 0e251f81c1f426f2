"""What people write must not become a control token.

Where a text spells one, a character that no text may hold (a Unicode noncharacter) is put behind its first letter
before the chat template runs; what the template renders is cut there and its pieces are encoded one by one, so that
the token's name is split like plain text.

    guard = Guard(tokenizer)
    cut = unused(messages)
    ids = guard.encode(render(guard.spell(messages, cut)), cut)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

CUTS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class Guard:
    """Knows the names of one tokenizer's control tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = {str(token.content): bool(token.special) for token in tokenizer.added_tokens_decoder.values()}
        self._all = _any_of(list(added))
        self._special = _any_of([name for name, special in added.items() if special])

    def turns(self, messages: Sequence[Mapping[str, Any]], cut: str) -> list[Any]:
        """`messages` with `cut` inside; what the assistant has written may hold its own marks (`<think>`)."""
        return [
            _spell(message, cut, self._special if message["role"] == "assistant" else self._all) for message in messages
        ]

    def spell(self, value: Any, cut: str) -> Any:
        """`value` with `cut` inside every control token's name."""
        return _spell(value, cut, self._all)

    def encode(self, rendered: str, cut: str, special: bool = False) -> list[int]:
        """The ids of what a template has made of it; `special`: with the tokens that begin a text."""
        first, *others = rendered.split(cut)
        return encode(self.tokenizer, first, special) + [
            token for piece in others for token in encode(self.tokenizer, piece, special=False)
        ]


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Ids of a raw text, in which control tokens may be spelled out."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    except (UnicodeEncodeError, TypeError):
        raise ValueError("The text holds half of a character (a lone surrogate); remove it.") from None
    return ids


def unused(values: Any) -> str:
    """A noncharacter that occurs nowhere in `values`."""
    seen = set(CUTS) & _letters(values)
    for cut in CUTS:
        if cut not in seen:
            return cut
    raise ValueError("The messages hold every Unicode noncharacter; remove one of them.")


def _spell(value: Any, cut: str, names: re.Pattern[str] | None) -> Any:
    if names is None:
        return value
    if isinstance(value, str):
        return names.sub(lambda found: found.group()[0] + cut + found.group()[1:], value)
    if isinstance(value, Mapping):
        return {_spell(key, cut, names): _spell(entry, cut, names) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell(entry, cut, names) for entry in value]
    return value


def _any_of(names: Sequence[str]) -> re.Pattern[str] | None:
    """Finds the names, the longest first; names of one letter cannot be cut."""
    longer = sorted((name for name in names if len(name) > 1 and not name.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longer))) if longer else None


def _letters(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(value)
    if isinstance(value, Mapping):
        return set().union(*(_letters(key) | _letters(entry) for key, entry in value.items()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_letters, value))
    return set()
