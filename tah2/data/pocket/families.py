"""The families of the pocket world: which tables they show, and how they write a line.

All ask for the same serial step, a look-up in a table that the prompt shows, repeated until a capital is met; so what
one family teaches serves the others, and nothing can be learned by heart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tah2.data.pocket.vocabulary import Ids

Table = Callable[[np.random.Generator, int, int], Ids]
"""(random, count, letters) -> where every small letter leads, int64 `[count, letters]`."""

FILLER, COUNT, PLACE, STEP, SEMICOLON, COMMA = range(6)
"""Parts of a line: a word nobody can predict, the lines left, the letter looked up, the value found, a mark."""


@dataclass(frozen=True)
class Family:
    name: str
    summary: str
    table: Table
    line: tuple[int, ...]
    """Parts of one line, in order; STEP comes right after PLACE."""
    chained: bool
    """The next line starts at the letter where this one ended; otherwise each line takes an argument of the prompt."""
    always_one_step: bool = False


def permutation(random: np.random.Generator, count: int, letters: int) -> Ids:
    return random.permuted(np.tile(np.arange(letters), (count, 1)), axis=1)


def function(random: np.random.Generator, count: int, letters: int) -> Ids:
    return random.integers(0, letters, (count, letters))


def affine(random: np.random.Generator, count: int, letters: int) -> Ids:
    """x -> a x + b modulo the number of letters, a invertible."""
    factors = np.asarray([a for a in range(1, letters) if np.gcd(a, letters) == 1])
    factor, shift = random.choice(factors, (count, 1)), random.integers(0, letters, (count, 1))
    return (factor * np.arange(letters) + shift) % letters


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "chase",
            "pointer chasing along a permutation",
            permutation,
            (FILLER, COUNT, PLACE, STEP),
            chained=True,
        ),
        Family(
            "iterate",
            "a unary operation, given as a table, iterated until its result is a value",
            function,
            (COUNT, PLACE, STEP, SEMICOLON),
            chained=True,
        ),
        Family(
            "modular",
            "x -> a x + b modulo the number of letters, iterated until its result is a value",
            affine,
            (COUNT, FILLER, PLACE, STEP),
            chained=True,
        ),
        Family(
            "evaluate",
            "nested expressions: every argument is a name bound to a name, bound to a name, ..., bound to a value",
            function,
            (COUNT, PLACE, STEP, SEMICOLON),
            chained=False,
        ),
        Family(
            "call",
            "a tool call: copy every argument's name and look its value up once (easy)",
            function,
            (COUNT, PLACE, STEP, COMMA),
            chained=False,
            always_one_step=True,
        ),
    )
}
