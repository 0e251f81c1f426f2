"""The words of the pocket world, and their ids.

Letters come in two cases: a small letter still has to be looked up, a capital is a value. A table is one word per entry
(`a>c`: a leads to c; `c>F`: c has the value F), so one look-up is one serial step. `3=c` binds argument 3 to letter c.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

PAD, BOS, EOS, QUESTION, HASH, SEMICOLON, COMMA = range(7)
MARKS = ("<pad>", "<bos>", "<eos>", "?", "#", ";", ",")
FILLERS = ("so", "then", "well")

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """Ids in order: marks, family names, fillers, counts 1 .. lines, small letters, capitals, entries, arguments."""

    families: tuple[str, ...]
    letters: int
    lines: int

    @cached_property
    def words(self) -> tuple[str, ...]:
        small = ascii_lowercase[: self.letters]
        symbols = small + small.upper()
        return (
            *MARKS,
            *self.families,
            *FILLERS,
            *(f"n{count}" for count in range(1, self.lines + 1)),
            *symbols,
            *(f"{source}>{target}" for source in small for target in symbols),
            *(f"{slot}={letter}" for slot in range(1, self.lines + 1) for letter in small),
        )

    @property
    def size(self) -> int:
        return len(self.words)

    def family(self, name: str) -> int:
        return len(MARKS) + self.families.index(name)

    @property
    def filler(self) -> int:
        return len(MARKS) + len(self.families)

    def count(self, count: Ids) -> Ids:
        """Ids of the counts (from 1)."""
        return self.filler + len(FILLERS) + count - 1

    @property
    def _symbols(self) -> int:
        return self.filler + len(FILLERS) + self.lines

    def symbol(self, letter: Ids, capital: NDArray[np.bool_] | bool = False) -> Ids:
        """Ids of letters (from 0), small or capital."""
        return self._symbols + letter + self.letters * np.asarray(capital, np.int64)

    def entry(self, source: Ids, target: Ids, capital: NDArray[np.bool_]) -> Ids:
        """Ids of table entries: small letter `source` leads to `target`."""
        first = self._symbols + 2 * self.letters
        return first + source * 2 * self.letters + target + self.letters * capital.astype(np.int64)

    def argument(self, slot: Ids, letter: Ids) -> Ids:
        """Ids of bound arguments; slots from 1."""
        first = self._symbols + 2 * self.letters + 2 * self.letters**2
        return first + (slot - 1) * self.letters + letter

    def text(self, ids: Iterable[int]) -> str:
        """Words between spaces."""
        return " ".join(self.words[int(token)] for token in ids)

    def ids(self, text: str) -> list[int]:
        """The inverse of `text`."""
        return [self.words.index(word) for word in text.split()]
