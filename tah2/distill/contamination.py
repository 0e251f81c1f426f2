"""Does a text hold a benchmark's problem? Two tests, both on words (lower case, no punctuation, CJK by character):

- *overlap*: text and problem share a run of `run` words (13 as a rule), a third of them different words of two letters
  or more: a run of numbers and single letters is nobody's problem;
- *equal*: the text, or one of its lines, is the whole problem, however short.

Runs that many problems share are boilerplate ("The input is given from Standard Input in the following format") and
prove nothing; they do not count. Identical texts, such as the shared turns of BFCL's variants, count as one problem
for that.

`Benchmarks` compares hashes of runs, all of a text at once, and confirms each hit word by word; `overlaps` is its
plain twin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
WORD_OF_CJK = re.compile(f"[{CJK}]")
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd: the place of a word in its run counts."""

BOILERPLATE = 5
"""A run in more distinct problem texts than this is boilerplate."""


@dataclass(frozen=True)
class ProblemText:
    benchmark: str
    problem: str
    text: str
    whole: bool = True
    """Whether this is all of the problem; one turn of a conversation is not, and is compared by its runs alone."""


@dataclass(frozen=True)
class Hit:
    benchmark: str
    problem: str
    kind: str
    """"equal" or "overlap"."""
    shared: str
    """The words that both have."""


def words_of(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def is_prose(run: Sequence[str]) -> bool:
    return len({word for word in run if (len(word) > 1 and word.isalpha()) or WORD_OF_CJK.match(word)}) >= len(run) // 3


class Benchmarks:
    """An index of problem texts; `find` asks it about one text."""

    def __init__(self, problems: Iterable[ProblemText], run: int = 13, boilerplate: int = BOILERPLATE) -> None:
        self.run = run
        self.problems = list(problems)
        self._words = [words_of(problem.text) for problem in self.problems]
        self._equal: dict[tuple[str, ...], int] = {}
        distinct: dict[tuple[str, ...], int] = {}
        for index, words in enumerate(self._words):
            if words and self.problems[index].whole:
                self._equal.setdefault(tuple(words), index)
            if words:
                distinct.setdefault(tuple(words), index)
        texts = list(distinct.values())
        runs = [self._runs(self._words[index]) for index in texts]
        owner = np.repeat(np.array(texts, np.int64), [len(found) for found in runs])
        start = np.concatenate([np.arange(len(found)) for found in runs]) if runs else np.zeros(0, np.int64)
        hashes = np.concatenate(runs) if runs else np.zeros(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._owner, self._start = hashes[order], owner[order], start[order]
        self._drop_boilerplate(boilerplate)

    def find(self, text: str) -> Hit | None:
        """The first problem that `text` holds, a whole one before a shared run."""
        words = words_of(text)
        for line in (words, *map(words_of, text.splitlines())):
            whole = self._equal.get(tuple(line))
            if whole is not None:
                return self._hit(whole, "equal", line)
        runs = self._runs(words)
        if not len(self._hashes) or not len(runs):
            return None
        place = np.minimum(np.searchsorted(self._hashes, runs), len(self._hashes) - 1)
        for begin in np.flatnonzero(self._hashes[place] == runs):
            found, shared = int(place[begin]), words[begin : begin + self.run]
            owner, start = int(self._owner[found]), int(self._start[found])
            if self._words[owner][start : start + self.run] == shared and is_prose(shared):
                return self._hit(owner, "overlap", shared)
        return None

    def _hit(self, index: int, kind: str, words: Sequence[str]) -> Hit:
        return Hit(self.problems[index].benchmark, self.problems[index].problem, kind, " ".join(words))

    def _runs(self, words: Sequence[str]) -> NDArray[np.uint64]:
        """A hash of every run of `run` words, uint64 `[max(0, len(words) - run + 1)]`."""
        count = max(0, len(words) - self.run + 1)
        codes = np.array([hash(word) for word in words], np.int64).view(np.uint64)
        found = np.zeros(count, np.uint64)
        if count:
            for offset in range(self.run):
                found = found * FACTOR + codes[offset : offset + count]
        return found

    def _drop_boilerplate(self, most: int) -> None:
        """Keep of every run that at most `most` texts hold one entry, and of the others none."""
        pairs = np.stack([self._hashes, self._owner.astype(np.uint64)])
        _, texts_of = np.unique(np.unique(pairs, axis=1)[0], return_counts=True)
        unique, first = np.unique(self._hashes, return_index=True)
        kept = first[texts_of <= most]
        assert len(unique) == len(texts_of)
        self._hashes, self._owner, self._start = self._hashes[kept], self._owner[kept], self._start[kept]


def overlaps(text: str, problem: str, run: int = 13) -> bool:
    """The plain twin: whether both share a run of `run` words, boilerplate or not."""
    ours, theirs = words_of(text), words_of(problem)
    runs = {tuple(theirs[i : i + run]) for i in range(len(theirs) - run + 1)}
    return any(is_prose(found := ours[i : i + run]) and tuple(found) in runs for i in range(len(ours) - run + 1))
