"""Where iterations go: the depth of every response token, by kind of token and by place in the response.

A token wears the depth of the position that it was drawn from: the passes that its prediction took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.study.analyses.measure import TokenTable

PLACES = 10
"""Parts of equal length that a response is cut into."""
CODE, MATH = "code", "math"


@dataclass(frozen=True)
class DepthMap:
    """One response, token by token."""

    title: str
    words: tuple[str, ...]
    depths: tuple[int, ...]
    prompt: str = ""

    @property
    def mean(self) -> float:
        return sum(self.depths) / max(1, len(self.depths))


@dataclass(frozen=True)
class ClassDepth:
    """The tokens of one kind."""

    tokens: int
    mean: float
    shares: tuple[float, ...]
    """Of its tokens that stopped after exactly 1, 2, ... iterations"""


@dataclass(frozen=True)
class Depths:
    ceiling: int
    tokens: int
    mean: float
    shares: tuple[float, ...]
    by_class: dict[str, ClassDepth]
    by_place: tuple[float, ...]
    """Mean depth of each of `PLACES` parts of the response, from its beginning to its end; NaN-free"""
    maps: tuple[DepthMap, ...]

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for picture, found in zip(values["maps"], self.maps, strict=True):
            picture["mean"] = found.mean
        return values


Words = Callable[[Sequence[int]], list[str]]
"""Token ids -> one printable string each."""


def depths(table: TokenTable, words: Words, names: Mapping[int, str] | None = None, maps: int = 3) -> Depths:
    """Statistics of all tokens and maps of the first `maps` documents.

    Classes are the data's own kinds (`names` of tags) or, for text, what `text_classes` reads off the words.
    """
    documents = [np.flatnonzero(table.document == name) for name in np.unique(table.document)]
    spoken = {i: words(table.target[rows].tolist()) for i, rows in enumerate(documents)}
    classes = np.empty(len(table), dtype=object)
    for i, rows in enumerate(documents):
        tagged = [names.get(int(tag), f"tag {tag}") for tag in table.tag[rows]] if names else text_classes(spoken[i])
        classes[rows] = tagged
    return Depths(
        ceiling=table.depths,
        tokens=len(table),
        mean=float(table.executed.mean()),
        shares=_shares(table.executed, table.depths),
        by_class={
            name: _class_depth(table.executed[classes == name], table.depths)
            for name in _in_order(classes.tolist(), names)
        },
        by_place=_by_place(table.executed, documents),
        maps=tuple(
            DepthMap(f"document {i + 1}", tuple(spoken[i]), tuple(table.executed[rows].tolist()))
            for i, rows in enumerate(documents[:maps])
        ),
    )


def _in_order(classes: Sequence[str], names: Mapping[int, str] | None) -> list[str]:
    """The classes that occur: in the order of their tags, or the most frequent first."""
    if names:
        return [name for _, name in sorted(names.items()) if name in set(classes)]
    return [name for name, _ in Counter(classes).most_common()]


def _class_depth(executed: NDArray[np.int64], ceiling: int) -> ClassDepth:
    return ClassDepth(len(executed), float(executed.mean()), _shares(executed, ceiling))


def _shares(executed: NDArray[np.int64], ceiling: int) -> tuple[float, ...]:
    return tuple((np.bincount(executed, minlength=ceiling + 1)[1:] / len(executed)).tolist())


def _by_place(executed: NDArray[np.int64], documents: Sequence[NDArray[np.int64]]) -> tuple[float, ...]:
    place = np.empty(len(executed), dtype=np.int64)
    for rows in documents:
        place[rows] = np.arange(len(rows)) * PLACES // len(rows)
    found = [executed[place == part] for part in range(PLACES)]
    overall = float(executed.mean())
    return tuple(float(part.mean()) if len(part) else overall for part in found)


def text_classes(words: Sequence[str]) -> list[str]:
    """The kind of each token of a text: code between fences, math between dollar signs, else by its characters."""
    kinds, region = [], ""
    for word in words:
        stripped = word.strip()
        if "```" in stripped:
            region = "" if region == CODE else CODE
            kinds.append(CODE)
            continue
        if region != CODE and ("$" in stripped or stripped in ("\\(", "\\)", "\\[", "\\]")):
            region = "" if region == MATH else MATH
            kinds.append(MATH)
            continue
        kinds.append(region or _by_characters(word, stripped))
    return kinds


def _by_characters(word: str, stripped: str) -> str:
    if not stripped:
        return "white space"
    if any(letter.isdigit() for letter in stripped):
        return "number"
    if stripped.startswith("<") and stripped.endswith(">") and len(stripped) > 2:
        return "special"
    if any(letter.isalpha() for letter in stripped):
        return "word" if word[:1].isspace() else "word, continued"
    return "operator" if set(stripped) <= set("+-*/=<>^%|&~×÷≤≥") else "punctuation"
