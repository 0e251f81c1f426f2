"""Tasks made from a seed: small vocabularies, exact verifiers, and known difficulty per token.

Both tasks show a function f as shuffled edge tokens, one token per edge (a, f(a)), and ask for a trace of lookups.
One line of the trace is four tokens, `[filler, rule, s, next]`: a filler that nobody can predict, a rule token, the
symbol where we are, and the symbol where we go. The next line starts where this one went. The trace ends in
`HASH z EOS`, z being the last symbol reached. Going k hops along f in one token is what needs depth: every token has a
tag, and the tag of `next` says k.

- *pointer chase*: f is any function of 12 nodes. The rule token R_k shows the stride of symbol s, k = 1 + s mod 3.
- *stop chase*: f is one cycle of 16 symbols, 7 of which are stop symbols. The rule token C_j counts the lines left, and
  `next` is the first stop symbol on the chain after s, so k is geometric and the same step serves at every depth.

The *base* task of each is written alike but always hops once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError, suggestion
from tah2.data.dataset import DataSet
from tah2.data.pocket import PocketConfig, PocketWorld
from tah2.data.store import TokenStore
from tah2.data.tags import ANSWER, COPY, END, FILLER, HOP, KINDS, MARK, PROMPT, RULE, tag_name

BOS, QUESTION, HASH, EOS = range(4)
FIXED = 4

__all__ = ["HOP", "KINDS", "PointerChase", "ProceduralConfig", "StopChase", "load_procedural", "tag_name"]

Split = Literal["train", "validation"]
LINE = 4


@dataclass(frozen=True)
class Trace:
    """What a verifier says of one response."""

    exact: bool
    """Every line and the end are right (fillers may be any filler)."""
    answer: bool
    """z is the right answer, whatever the lines say."""
    lines_right: int
    """Lines right before the first mistake."""


class Task(Protocol):
    """A procedural task draws samples (and judges responses, each in its own words)."""

    @property
    def vocab_size(self) -> int: ...
    def generate(self, count: int, seed: int, split: Split = "train") -> TokenStore: ...


@dataclass(frozen=True)
class _Vocabulary:
    """Ids in order: BOS Q HASH EOS, fillers, rules, symbols, edges (a * symbols + b)."""

    fillers: int
    rules: int
    symbols: int

    @property
    def filler(self) -> int:
        return FIXED

    @property
    def rule(self) -> int:
        return FIXED + self.fillers

    @property
    def symbol(self) -> int:
        return self.rule + self.rules

    @property
    def edge(self) -> int:
        return self.symbol + self.symbols

    @property
    def size(self) -> int:
        return self.edge + self.symbols**2

    def describe(self, token: int) -> str:
        """The token for people: `7>3` is an edge, `s7` a symbol."""
        if token < FIXED:
            return ("BOS", "Q", "HASH", "EOS")[token]
        if token < self.rule:
            return f"filler{token - self.filler}"
        if token < self.symbol:
            return f"R{token - self.rule + 1}"
        if token < self.edge:
            return f"s{token - self.symbol}"
        source, target = divmod(token - self.edge, self.symbols)
        return f"{source}>{target}"


@dataclass(frozen=True)
class PointerChase:
    """In-context pointer chase with a stride per symbol."""

    nodes: int = 12
    lines: int = 5
    strides: int = 3
    fillers: int = 4
    base: bool = False
    """Always hop once, though the rule tokens are shown."""

    def __post_init__(self) -> None:
        if min(self.nodes, self.lines, self.strides, self.fillers) < 1:
            raise ConfigError("A pointer chase needs at least one node, line, stride and filler.")

    @property
    def vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self.fillers, self.strides, self.nodes)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def generate(self, count: int, seed: int, split: Split = "train") -> TokenStore:
        """`count` samples; the two splits never share random numbers."""
        random = _random(seed, split)
        f = random.integers(0, self.nodes, (count, self.nodes))
        edges = _shuffled_edges(f, np.tile(np.arange(self.nodes), (count, 1)), self.nodes, random)
        place = random.integers(0, self.nodes, count)
        filler = random.integers(0, self.fillers, (count, self.lines))
        lines, hops = [], []
        for line in range(self.lines):
            stride = 1 + place % self.strides
            hop = np.ones_like(stride) if self.base else stride
            target = _hop(f, place, hop, self.strides)
            lines.append(np.stack([filler[:, line], stride - 1, place, target], 1))
            hops.append(hop)
            place = target
        starts = lines[0][:, 2]
        voc = self.vocabulary
        prompt = np.column_stack([np.full(count, BOS), voc.edge + edges, np.full(count, QUESTION), voc.symbol + starts])
        amount = np.full(count, self.lines)
        return _assemble(voc, prompt, np.stack(lines, 1), np.stack(hops, 1), amount, f"pointer-{split}-{seed}")

    def verify(self, prompt: Sequence[int], response: Sequence[int]) -> Trace:
        voc = self.vocabulary
        f = _read_edges(voc, prompt[1 : 1 + self.nodes])
        place, expected = prompt[-1] - voc.symbol, []
        for _ in range(self.lines):
            stride = 1 + place % self.strides
            target = place
            for _ in range(1 if self.base else stride):
                target = f[target]
            expected.append((stride - 1, place, target))
            place = target
        return _judge(voc, expected, response)


@dataclass(frozen=True)
class StopChase:
    """Chase until a stop symbol; the stop symbols are the first `stops` of the `symbols`."""

    symbols: int = 16
    stops: int = 7
    min_lines: int = 3
    max_lines: int = 5
    fillers: int = 3
    base: bool = False
    """Always hop once."""
    cycle: int | None = None
    """Base only: f is a cycle of this many of the symbols (a curriculum begins with short ones)."""
    replace: float = 0.0
    """Base only: chance that the symbol of a line is a random one, so that a hop must read its own token."""

    def __post_init__(self) -> None:
        if not 1 <= self.stops <= self.symbols or not 1 <= self.min_lines <= self.max_lines or self.fillers < 1:
            raise ConfigError("A stop chase needs 1 <= stops <= symbols, 1 <= min_lines <= max_lines, and a filler.")
        if not self.base and (self.cycle is not None or self.replace):
            raise ConfigError("'cycle' and 'replace' belong to the base task of the stop chase: set 'base' to true.")
        if self.cycle is not None and not 1 <= self.cycle <= self.symbols:
            raise ConfigError(f"'cycle' must be between 1 and the {self.symbols} symbols, not {self.cycle}.")
        if not 0 <= self.replace <= 1:
            raise ConfigError(f"'replace' is a probability, not {self.replace}.")

    @property
    def vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self.fillers, self.max_lines, self.symbols)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def generate(self, count: int, seed: int, split: Split = "train") -> TokenStore:
        """`count` samples; the two splits never share random numbers."""
        random = _random(seed, split)
        length = self.cycle or self.symbols
        walk = random.permuted(np.tile(np.arange(self.symbols), (count, 1)), axis=1)[:, :length]
        f = np.zeros((count, self.symbols), np.int64)
        np.put_along_axis(f, walk, np.roll(walk, -1, axis=1), 1)
        edges = _shuffled_edges(f, walk, self.symbols, random)
        amount = random.integers(self.min_lines, self.max_lines + 1, count)
        filler = random.integers(0, self.fillers, (count, self.max_lines))
        replaced = random.random((count, self.max_lines)) < self.replace
        others = np.take_along_axis(walk, random.integers(0, length, (count, self.max_lines)), 1)
        place = walk[:, 0]
        start, lines, hops = place, [], []
        for line in range(self.max_lines):
            place = np.where(replaced[:, line] & (line > 0), others[:, line], place)
            target, hop = self._next(f, place)
            rule = np.maximum(amount - line, 1) - 1
            lines.append(np.stack([filler[:, line], rule, place, target], 1))
            hops.append(hop)
            place = target
        voc = self.vocabulary
        prompt = np.column_stack(
            [
                np.full(count, BOS),
                voc.edge + edges,
                np.full(count, QUESTION),
                voc.rule + amount - 1,
                voc.symbol + start,
            ]
        )
        return _assemble(voc, prompt, np.stack(lines, 1), np.stack(hops, 1), amount, f"stop-{split}-{seed}")

    def verify(self, prompt: Sequence[int], response: Sequence[int]) -> Trace:
        """Judges a response to a prompt; with `replace` set a trace cannot be foretold, so that is refused."""
        if self.replace:
            raise ConfigError("Responses cannot be verified with 'replace': verify with a task that does not replace.")
        voc = self.vocabulary
        f = _read_edges(voc, prompt[1 : 1 + (self.cycle or self.symbols)])
        amount, place = prompt[-2] - voc.rule + 1, prompt[-1] - voc.symbol
        expected = []
        for line in range(amount):
            target = f[place]
            while not self.base and target >= self.stops:
                target = f[target]
            expected.append((amount - line - 1, place, target))
            place = target
        return _judge(voc, expected, response)

    def _next(self, f: NDArray[np.int64], place: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each line goes and in how many hops, both int64 `[count]`."""
        target, hops = _hop(f, place, np.ones_like(place), 1), np.ones_like(place)
        while not self.base and (on := target >= self.stops).any():
            target = np.where(on, _hop(f, target, np.ones_like(place), 1), target)
            hops += on
        return target, hops


@dataclass(frozen=True)
class ProceduralConfig:
    """A procedural task as training data."""

    task: str = "stop-chase"
    """"stop-chase", "pointer-chase" or "pocket"."""
    base: bool = False
    samples: int = 20000
    validation_samples: int = 1000
    seed: int = 0
    cycle: int | None = None
    """Stop chase, base only: cycle length."""
    replace: float = 0.0
    """Stop chase, base only: chance of a random symbol in a line."""
    pocket: PocketConfig | None = None
    """Pocket world: what its problems are like."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.validation_samples < 0:
            raise ConfigError("A procedural data set needs at least one sample, and no fewer than 0 for validation.")
        if self.task not in TASKS:
            raise ConfigError(f"Unknown task {self.task!r}{suggestion(self.task, TASKS)}.")
        if self.task != "stop-chase" and (self.cycle is not None or self.replace):
            raise ConfigError("'cycle' and 'replace' belong to the task 'stop-chase'.")
        if self.task != "pocket" and self.pocket is not None:
            raise ConfigError("The options of 'procedural.pocket' belong to the task 'pocket'.")
        self.build_task()

    def build_task(self) -> Task:
        return TASKS[self.task](self)


TASKS: dict[str, Callable[[ProceduralConfig], Task]] = {
    "stop-chase": lambda config: StopChase(base=config.base, cycle=config.cycle, replace=config.replace),
    "pointer-chase": lambda config: PointerChase(base=config.base),
    "pocket": lambda config: PocketWorld(config.pocket, base=config.base),
}
"""How a recipe's task is made; a new task is one row."""


def load_procedural(config: ProceduralConfig) -> DataSet:
    """Training and validation samples of a task, from disjoint random streams of one seed."""
    task, held_out = config.build_task(), config.validation_samples
    return DataSet.of(
        task.generate(config.samples, config.seed, "train"),
        validation=task.generate(max(1, held_out), config.seed, "validation").select(range(held_out)),
        seed=config.seed,
        key=repr(config),
    )


def prompt_and_response(store: TokenStore, index: int) -> tuple[list[int], list[int]]:
    """One sample cut where its response begins."""
    sample = store.sample(index)
    begin = int(sample.mask.argmax())
    return sample.ids[:begin].tolist(), sample.ids[begin:].tolist()


def _random(seed: int, split: Split) -> np.random.Generator:
    return np.random.default_rng([seed, ("train", "validation").index(split)])


def _hop(f: NDArray[np.int64], place: NDArray[np.int64], hops: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """f applied `hops[i]` times to `place[i]`; f is int64 `[count, symbols]`."""
    for done in range(most):
        place = np.where(done < hops, np.take_along_axis(f, place[:, None], 1)[:, 0], place)
    return place


def _shuffled_edges(
    f: NDArray[np.int64], nodes: NDArray[np.int64], symbols: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Edge numbers a * symbols + f(a) of the `nodes` `[count, n]`, each row in a random order."""
    return random.permuted(nodes * symbols + np.take_along_axis(f, nodes, 1), axis=1)


def _assemble(
    voc: _Vocabulary,
    prompt: NDArray[np.int64],
    lines: NDArray[np.int64],
    hops: NDArray[np.int64],
    amount: NDArray[np.int64],
    name: str,
) -> TokenStore:
    """Samples from prompt ids `[count, p]`, line numbers `[count, n, 4]` and hops `[count, n]`.

    Of sample i the first `amount[i]` lines are used.
    """
    count, most = hops.shape
    trace = (lines + np.asarray([voc.filler, voc.rule, voc.symbol, voc.symbol])).reshape(count, most * LINE)
    kinds = np.tile(np.asarray([FILLER, RULE, COPY, HOP]), (count, most, 1))
    kinds[:, :, 3] += hops
    answer = trace[np.arange(count), amount * LINE - 1]
    end = np.stack([np.full(count, HASH), answer, np.full(count, EOS)], 1)
    ids = np.concatenate([prompt, trace, end], 1)
    tags = np.concatenate(
        [np.full_like(prompt, PROMPT), kinds.reshape(count, -1), np.tile([MARK, ANSWER, END], (count, 1))], 1
    )
    in_trace = np.arange(most * LINE) < amount[:, None] * LINE
    used = np.concatenate([np.ones_like(prompt, bool), in_trace, np.ones_like(end, bool)], 1)
    lengths = used.sum(1)
    return TokenStore(
        ids=ids[used].astype(np.int32),
        mask=tags[used] != PROMPT,
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        names=tuple(f"{name}-{index}" for index in range(count)),
        source=np.zeros(count, np.int16),
        tags=tags[used].astype(np.int16),
    )


def _read_edges(voc: _Vocabulary, tokens: Sequence[int]) -> dict[int, int]:
    return dict(divmod(int(token) - voc.edge, voc.symbols) for token in tokens)


def _judge(voc: _Vocabulary, expected: Sequence[tuple[int, int, int]], response: Sequence[int]) -> Trace:
    """Compare a response with the expected (rule, symbol, next) of every line."""
    right = 0
    for number, (rule, place, target) in enumerate(expected):
        line = list(response[LINE * number : LINE * (number + 1)])
        filler_fits = bool(line) and voc.filler <= line[0] < voc.rule
        if not filler_fits or line[1:] != [voc.rule + rule, voc.symbol + place, voc.symbol + target]:
            break
        right += 1
    answer = voc.symbol + expected[-1][2]
    tail = list(response[LINE * len(expected) :])
    exact = right == len(expected) and tail == [HASH, answer, EOS]
    marks = [i for i, token in enumerate(response) if token == HASH]
    answered = bool(marks) and list(response[marks[0] + 1 : marks[0] + 2]) == [answer]
    return Trace(exact, answered, right)
