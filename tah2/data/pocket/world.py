"""The pocket world: small reasoning problems with exact answers, most tokens easy, few of known serial depth.

A prompt shows a table (`a>c c>F ...`, in random order) and a question; the response is a chain of thought of a few
lines. Each line names a letter and then the value that the table gives it, after as many look-ups as it takes to meet a
capital. Those value tokens are the hard ones: k look-ups in one token, k roughly geometric. All else is copying,
counting down, and filler words that nobody can predict.

    <bos> c>F a>c ... ? chase n2 a        (a leads to c, and c has the value F)
    so n2 a F then n1 f B # B <eos>

The *base* task mostly writes every look-up down (`so n2 a c F then n1 f B`): after a small letter comes what the table
says of it. Post-training asks for the value at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError, suggestion
from tah2.data import tags
from tah2.data.pocket import vocabulary as words
from tah2.data.pocket.families import COMMA, COUNT, FAMILIES, FILLER, PLACE, SEMICOLON, STEP, Family
from tah2.data.pocket.vocabulary import BOS, EOS, FILLERS, HASH, QUESTION, Ids, Vocabulary
from tah2.data.store import TokenStore

Split = Literal["train", "validation", "test"]
SPLITS: dict[Split, tuple[int, int]] = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}
"""Which tenths of all problems a split holds; a problem's tenth is a hash of its content, whatever the seed."""
TENTHS = 10
PART_TAGS = {
    FILLER: tags.FILLER,
    COUNT: tags.RULE,
    PLACE: tags.COPY,
    STEP: tags.HOP,
    SEMICOLON: tags.MARK,
    COMMA: tags.MARK,
}


@dataclass(frozen=True)
class PocketConfig:
    """What problems there are. The vocabulary depends on `letters` and `max_lines` alone."""

    families: tuple[str, ...] = tuple(FAMILIES)
    """In equal shares."""
    letters: int = 12
    letters_used: int | None = None
    """Tables hold this many of the letters; all by default (a curriculum begins with few)."""
    min_lines: int = 2
    max_lines: int = 8
    continue_share: float = 0.6
    """Chance that a table entry leads to a small letter, so that another look-up follows."""
    max_hops: int = 5
    """No value is further away than this many look-ups."""
    replace: float = 0.5
    """Base only: chance that the letter of a line is a random one (without a loss), so that a step reads its own
    token."""
    skip: float = 0.3
    """Base only: chance that a line gives the value at once, as post-training asks for."""

    def __post_init__(self) -> None:
        for name in self.families:
            if name not in FAMILIES:
                raise ConfigError(f"Unknown pocket family {name!r}{suggestion(name, FAMILIES)}.")
        if not self.families or len(set(self.families)) < len(self.families):
            raise ConfigError("'families' names each family of the pocket world once, and at least one.")
        if not 2 <= self.letters <= 26 or not 2 <= self.used <= self.letters:
            raise ConfigError("The pocket world has 2 to 26 'letters', and tables use at least 2 of them.")
        if not 1 <= self.min_lines <= self.max_lines:
            raise ConfigError("The pocket world needs 1 <= min_lines <= max_lines.")
        if not 0 <= self.continue_share < 1 or self.max_hops < 1:
            raise ConfigError("'continue_share' lies in [0, 1), and 'max_hops' is at least 1.")
        if not 0 <= self.replace <= 1 or not 0 <= self.skip <= 1:
            raise ConfigError("'replace' and 'skip' are chances between 0 and 1.")

    @property
    def used(self) -> int:
        return self.letters if self.letters_used is None else self.letters_used


@dataclass(frozen=True)
class PocketProblem:
    id: str
    family: str
    prompt_ids: tuple[int, ...]
    gold_ids: tuple[int, ...]
    """One right response; filler words may be others."""
    hops: tuple[int, ...]
    """Look-ups that each value token takes (the base writes most of them down, 1 or 0 each: see `tags`)."""
    places: tuple[int, ...]
    """Where in the response the value tokens stand."""


@dataclass(frozen=True)
class PocketVerdict:
    correct: bool
    """The final answer is right: the value after `#`; of families without one, every value of the list."""
    exact: bool
    """Every token is right (a filler may be any filler)."""
    steps_right: int
    """Value tokens before the first that is wrong."""


@dataclass(frozen=True)
class _Draw:
    """`count` problems of one family before they are written down."""

    f: Ids
    """`[count, letters used]`"""
    ends: NDArray[np.bool_]
    """`[count, letters used]`: the entry's target is a capital"""
    hops: Ids
    """`[count, letters used]`: look-ups from each letter to its value"""
    amount: Ids
    """`[count]`: lines"""
    start: Ids
    """`[count, max_lines]`: letters of the arguments; chained families use the first"""
    split: NDArray[np.int64]
    """`[count]`: the tenth that the problem falls into"""

    def select(self, rows: Ids) -> _Draw:
        return _Draw(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class _Columns(NamedTuple):
    """Part of what is written, `[count, columns]` each."""

    ids: Ids
    tags: Ids
    used: NDArray[np.bool_]
    loss: NDArray[np.bool_]


class PocketWorld:
    """Problems of a `PocketConfig`, as training data and as test problems."""

    def __init__(self, config: PocketConfig | None = None, base: bool = False) -> None:
        self.config = config or PocketConfig()
        self.base = base

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(tuple(FAMILIES), self.config.letters, self.config.max_lines)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def generate(self, count: int, seed: int, split: Split = "train") -> TokenStore:
        """`count` samples; no two splits share a problem, whatever their seeds."""
        random = np.random.default_rng([seed, list(SPLITS).index(split), self.base])
        names = self.config.families
        share = np.bincount(np.arange(count) % len(names), minlength=len(names))
        written = [
            self._written(FAMILIES[name], int(part), random, split, f"{name}-{split}-{seed}") if part else None
            for name, part in zip(names, share, strict=True)
        ]
        order = random.permutation(count)
        offsets = np.concatenate([[0], np.cumsum(share)])
        owner = np.searchsorted(offsets, order, side="right") - 1
        samples = []
        for who, at in zip(owner, order, strict=True):
            store = written[who]
            assert store is not None, "a family without samples has no index"
            samples.append(store.sample(int(at - offsets[who])))
        return TokenStore.of(samples)

    def problems(self, count: int, seed: int, split: Split = "test") -> list[PocketProblem]:
        """`count` problems with their answers, families mixed."""
        store = self.generate(count, seed, split)
        problems = []
        for index in range(len(store)):
            sample = store.sample(index)
            assert sample.tags is not None
            begin = int((sample.tags != tags.PROMPT).argmax())
            places = np.flatnonzero(sample.tags >= tags.HOP)
            hops = tuple((sample.tags[places] - tags.HOP).tolist())
            prompt, gold = tuple(sample.ids[:begin].tolist()), tuple(sample.ids[begin:].tolist())
            family = sample.name.partition("-")[0]
            problems.append(PocketProblem(sample.name, family, prompt, gold, hops, tuple((places - begin).tolist())))
        return problems

    def verify(self, problem: PocketProblem, response: Sequence[int]) -> PocketVerdict:
        """Judge the token ids of a response; tokens after `<eos>` do not count."""
        family, gold = FAMILIES[problem.family], list(problem.gold_ids)
        given = [int(token) for token in response]
        given = given[: given.index(EOS) + 1] if EOS in given else given
        right = [given[place : place + 1] == [gold[place]] for place in problem.places]
        exact = len(given) == len(gold) and all(map(self._same, given, gold))
        correct = exact
        if family.chained:
            correct = HASH in given and given[given.index(HASH) :] == gold[gold.index(HASH) :]
        return PocketVerdict(correct, exact, ([*right, False]).index(False))

    def text(self, ids: Sequence[int]) -> str:
        return self.vocabulary.text(ids)

    def _same(self, given: int, gold: int) -> bool:
        """Equal, or both fillers."""
        fillers = range(self.vocabulary.filler, self.vocabulary.filler + len(FILLERS))
        return given == gold or (given in fillers and gold in fillers)

    def _written(self, family: Family, count: int, random: np.random.Generator, split: Split, name: str) -> TokenStore:
        low, high = SPLITS[split]
        kept: list[_Draw] = []
        found = 0
        while found < count:
            more = int(1.2 * (count - found) * TENTHS / (high - low)) + 16
            draw = self._draw(family, more, random)
            draw = draw.select(np.flatnonzero((draw.split >= low) & (draw.split < high)))
            kept.append(draw)
            found += len(draw.amount)
        fields = _Draw.__dataclass_fields__
        draw = _Draw(*(np.concatenate([getattr(part, field) for part in kept])[:count] for field in fields))
        return self._write(family, draw, random, name)

    def _draw(self, family: Family, count: int, random: np.random.Generator) -> _Draw:
        config, used = self.config, self.config.used
        f = family.table(random, count, used)
        ends = random.random((count, used)) >= config.continue_share
        ends |= family.always_one_step
        ends |= _hops(f, ends, config.max_hops) > config.max_hops
        amount = random.integers(config.min_lines, config.max_lines + 1, count)
        start = random.integers(0, used, (count, config.max_lines))
        hops = _hops(f, ends, config.max_hops)
        begin = start[:, :1] if family.chained else np.where(np.arange(config.max_lines) < amount[:, None], start, 0)
        content = np.concatenate([f, ends, amount[:, None], begin], 1)
        tenth = _digest(content, list(FAMILIES).index(family.name)) % np.uint64(TENTHS)
        return _Draw(f, ends, hops, amount, start, tenth.astype(np.int64))

    def _write(self, family: Family, draw: _Draw, random: np.random.Generator, name: str) -> TokenStore:
        """Prompts and lines as one rectangle of ids and tags, of which a mask says what is used."""
        count, most = len(draw.amount), self.config.max_lines
        prompt, prompt_used = self._prompt(family, draw, random)
        rectangle = [_Columns(prompt, np.full_like(prompt, tags.PROMPT), prompt_used, np.zeros_like(prompt, bool))]
        letter = last = draw.start[:, 0]
        for line in range(most):
            if not family.chained:
                letter = draw.start[:, line]
            written, value = self._line(family, draw, line, letter, random)
            rectangle.append(written)
            last = np.where(line < draw.amount, value, last)
            letter = value
        end, kinds = np.full((count, 1), EOS), np.full((count, 1), tags.END)
        if family.chained:
            value_ids = self.vocabulary.symbol(last, True)
            end = np.stack([np.full(count, HASH), value_ids, np.full(count, EOS)], 1)
            kinds = np.tile([tags.MARK, tags.ANSWER, tags.END], (count, 1))
        rectangle.append(_Columns(end, kinds, np.ones_like(end, bool), np.ones_like(end, bool)))
        ids, kinds, used, loss = (np.concatenate(parts, 1) for parts in zip(*rectangle, strict=True))
        return TokenStore(
            ids=ids[used].astype(np.int32),
            mask=loss[used],
            starts=np.concatenate([[0], np.cumsum(used.sum(1))]),
            names=tuple(f"{name}-{index}" for index in range(count)),
            source=np.zeros(count, np.int16),
            tags=kinds[used].astype(np.int16),
        )

    def _line(
        self, family: Family, draw: _Draw, line: int, letter: Ids, random: np.random.Generator
    ) -> tuple[_Columns, Ids]:
        """Line number `line` of every problem, from `letter` `[count]` on, and the letters of the values found."""
        voc, count = self.vocabulary, len(letter)
        replaced = (random.random(count) < self.config.replace) & self.base
        place = np.where(replaced, random.integers(0, self.config.used, count), letter)
        steps, kinds, taken, value = self._steps(draw, place, random)
        columns = {
            FILLER: voc.filler + random.integers(0, len(FILLERS), count),
            COUNT: voc.count(np.maximum(draw.amount - line, 1)),
            PLACE: voc.symbol(place),
            SEMICOLON: np.full(count, words.SEMICOLON),
            COMMA: np.full(count, words.COMMA),
        }
        on = line < draw.amount[:, None]
        parts = [
            _Columns(steps, kinds, taken & on, np.ones_like(taken))
            if part == STEP
            else _Columns(
                columns[part][:, None],
                np.full((count, 1), PART_TAGS[part]),
                on,
                ~replaced[:, None] if part == PLACE else np.ones((count, 1), bool),
            )
            for part in family.line
        ]
        return _Columns(*(np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True))), value

    def _steps(self, draw: _Draw, place: Ids, random: np.random.Generator) -> tuple[Ids, Ids, NDArray[np.bool_], Ids]:
        """From `place` to its value: ids and tags `[count, steps]`, which of them are written, and the value's letter.

        The base writes every look-up (but for lines that it skips), else the value alone is written. A first look-up
        that the base might have skipped is tagged HOP + 0.
        """
        rows, hops = np.arange(len(place)), draw.hops[np.arange(len(place)), place]
        ids, target, capital = [], place, np.zeros(len(place), bool)
        for done in range(self.config.max_hops):
            on = done < hops
            capital = np.where(on, draw.ends[rows, target], capital)
            target = np.where(on, draw.f[rows, target], target)
            ids.append(self.vocabulary.symbol(target, capital))
        if not self.base:
            return ids[-1][:, None], tags.HOP + hops[:, None], np.ones((len(place), 1), bool), target
        step, wanted = np.arange(self.config.max_hops), hops[:, None]
        skipped = random.random((len(place), 1)) < self.config.skip
        written = np.where(skipped, step == wanted - 1, step < wanted)
        kinds = tags.HOP + np.where(skipped, wanted, np.where((step == 0) & (wanted > 1), 0, 1))
        return np.stack(ids, 1), kinds, written, target

    def _prompt(self, family: Family, draw: _Draw, random: np.random.Generator) -> tuple[Ids, NDArray[np.bool_]]:
        """`<bos> table [arguments] ? family lines [start]`, and which of its places are used."""
        voc, most, used = self.vocabulary, self.config.max_lines, self.config.used
        count = len(draw.amount)
        source = np.tile(np.arange(used), (count, 1))
        table = random.permuted(voc.entry(source, draw.f, draw.ends), axis=1)
        question = np.stack(
            [np.full(count, QUESTION), np.full(count, voc.family(family.name)), voc.count(draw.amount)], 1
        )
        bos = np.full((count, 1), BOS)
        if family.chained:
            prompt = np.concatenate([bos, table, question, voc.symbol(draw.start[:, :1])], 1)
            return prompt, np.ones_like(prompt, bool)
        left = draw.amount[:, None] - np.arange(most)
        arguments = voc.argument(np.maximum(left, 1), draw.start)
        prompt = np.concatenate([bos, table, arguments, question], 1)
        mask = np.ones_like(prompt, bool)
        mask[:, 1 + used : 1 + used + most] = left > 0
        return prompt, mask


def _hops(f: Ids, ends: NDArray[np.bool_], most: int) -> Ids:
    """Look-ups from every letter to its value, `[count, letters]`; `most + 1` stands for more than `most`."""
    place = np.tile(np.arange(f.shape[1]), (len(f), 1))
    hops, going = np.zeros_like(place), np.ones_like(place, bool)
    for _ in range(most + 1):
        hops += going
        going &= ~np.take_along_axis(ends, place, 1)
        place = np.take_along_axis(f, place, 1)
    return hops


def _digest(content: Ids, salt: int) -> NDArray[np.uint64]:
    """A hash of each row of `content`."""
    digest = np.full(len(content), salt + 1, np.uint64)
    for column in content.T.astype(np.uint64):
        digest = (digest ^ (column + np.uint64(0x9E37))) * np.uint64(0xBF58476D1CE4E5B9)
        digest ^= digest >> np.uint64(31)
    return digest
