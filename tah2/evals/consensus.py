"""cons@n: majority voting over n of the recorded responses, drawn without replacement.

A response votes for its canonical answer; one without an answer does not vote. The answer with most votes wins, ties
are broken at random (their expected credit counts), and a draw in which nobody votes earns nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from tah2.config.strict import ConfigError
from tah2.evals.statistics import Floats

EXACT_UP_TO = 512
"""Responses per problem up to which binomial coefficients fit comfortably into a float."""


@dataclass(frozen=True)
class Ballot:
    """The votes of one problem."""

    counts: tuple[int, ...]
    """Responses per distinct answer."""
    credit: tuple[float, ...]
    """What each answer earns when it wins: the mean grade of the responses that gave it."""
    silent: int = 0
    """Responses without an answer."""

    @property
    def responses(self) -> int:
        return sum(self.counts) + self.silent

    @classmethod
    def of(cls, answers: Sequence[Hashable | None], grades: Sequence[float]) -> Ballot:
        """From one answer (None: no answer) and one grade per response."""
        if len(answers) != len(grades):
            raise ConfigError(f"{len(answers)} answers came with {len(grades)} grades.")
        earned: defaultdict[Hashable, list[float]] = defaultdict(list)
        for answer, grade in zip(answers, grades, strict=True):
            if answer is not None:
                earned[answer].append(float(grade))
        return cls(
            tuple(len(each) for each in earned.values()),
            tuple(sum(each) / len(each) for each in earned.values()),
            sum(answer is None for answer in answers),
        )


def consensus_exact(ballot: Ballot) -> Floats:
    """Expected credit of the vote among n = 1..R responses, over all draws without replacement: `[R]`.

    Answer k wins a draw of n with v votes when no other answer has more; it then shares with the j others that also
    have v. The number of such draws is C(c_k, v) times the ways in which the other answers, at most v votes each, and
    the silent ones, as many as they like, fill the other n - v places; these are counted answer by answer, by places
    filled and by ties.
    """
    total = ballot.responses
    if not 1 <= total <= EXACT_UP_TO:
        raise ConfigError(f"Exact voting takes 1 to {EXACT_UP_TO} responses per problem, not {total}; use draws.")
    expected = np.zeros(total + 1)
    for k, (count, credit) in enumerate(zip(ballot.counts, ballot.credit, strict=True)):
        if credit == 0:
            continue
        others = [*ballot.counts[:k], *ballot.counts[k + 1 :]]
        for votes in range(1, count + 1):
            ways = _ways_of_others(others, ballot.silent, votes, total)
            shared = (ways / np.arange(1, ways.shape[1] + 1)).sum(1)
            expected[votes:] += credit * comb(count, votes) * shared[: total + 1 - votes]
    draws = np.array([float(comb(total, n)) for n in range(total + 1)])
    return np.asarray((expected / draws)[1:])


def _ways_of_others(others: Sequence[int], silent: int, most: int, total: int) -> Floats:
    """`[places, ties]`: ways to fill places when no answer gets more than `most` votes and `ties` get exactly that."""
    able = sum(count >= most for count in others)
    ways = np.zeros((total + 1, able + 1))
    ways[: silent + 1, 0] = [comb(silent, place) for place in range(silent + 1)]
    for count in others:
        before, ways = ways, np.zeros_like(ways)
        for votes in range(min(count, most) + 1):
            placed = comb(count, votes) * before[: total + 1 - votes]
            if votes == most:
                ways[votes:, 1:] += placed[:, :-1]
            else:
                ways[votes:] += placed
    return ways


def consensus_sampled(ballot: Ballot, draws: int = 1000, seed: int = 0) -> Floats:
    """As `consensus_exact`, from random orders of the responses: the first n of each are a draw of n. `[R]`."""
    if not ballot.responses:
        raise ConfigError("There are no responses to vote.")
    random = np.random.default_rng(seed)
    voters = np.repeat(np.arange(len(ballot.counts) + 1), [*ballot.counts, ballot.silent])
    credit = np.asarray(ballot.credit, dtype=np.float64)
    earned = np.zeros(ballot.responses)
    for _ in range(draws):
        order = random.permutation(voters)
        tally = np.cumsum(order[:, None] == np.arange(len(ballot.counts)), axis=0)
        if not len(credit):
            continue
        winners = (tally == tally.max(1, keepdims=True)) & (tally > 0)
        earned += (winners @ credit) / np.maximum(winners.sum(1), 1)
    return earned / draws
