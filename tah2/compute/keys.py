"""Visible keys at every depth at once: exact for recorded depths, in expectation for planning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from tah2.config.strict import ConfigError
from tah2.visibility import Rule, keys_of_earlier_token, keys_of_own_token


@lru_cache(maxsize=256)
def earlier_keys(rule: Rule, max_depth: int) -> tuple[tuple[int, ...], ...]:
    """[k - 1][m - 1]: keys that a query at depth m reads from one earlier token of k executed depths."""
    depths = range(1, max_depth + 1)
    return tuple(tuple(int(keys_of_earlier_token(rule, k, m, max_depth)) for m in depths) for k in depths)


@lru_cache(maxsize=256)
def own_keys(rule: Rule, max_depth: int) -> tuple[int, ...]:
    """[m - 1]: keys of its own token that a query at depth m reads, its own included."""
    return tuple(keys_of_own_token(rule, m) for m in range(1, max_depth + 1))


def keys_at_depths(
    rule: Rule, executed: Tensor, max_depth: int, document: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Visible keys of every token at every depth, as if it reached each: long `[T, M]`, and its 1-based position `[T]`.

    `executed` `[T]` holds executed depths in order of position; `document` `[T]` names each token's document (one
    document by default; tokens of a document are neighbours). Time and memory are O(T M).
    """
    check_depths(executed, max_depth)
    table = torch.tensor(earlier_keys(rule, max_depth), device=executed.device)
    own = torch.tensor(own_keys(rule, max_depth), device=executed.device)
    each = table[executed.long() - 1]
    before = each.cumsum(0) - each
    index = torch.arange(len(executed), device=executed.device)
    start = torch.zeros_like(index) if document is None else _starts(document, index)
    return before - before[start] + own, index - start + 1


def check_depths(executed: Tensor, max_depth: int) -> None:
    if not len(executed):
        return
    least, most = (int(bound) for bound in executed.aminmax())
    if not 1 <= least <= most <= max_depth:
        raise ValueError(
            f"Recorded depths must lie between 1 and the ceiling {max_depth}, not between {least} and {most}; "
            "pass the ceiling that they were recorded under."
        )


def _starts(document: Tensor, index: Tensor) -> Tensor:
    """The index of the first token of each token's document: long `[T]`."""
    opens = torch.ones_like(index, dtype=torch.bool)
    opens[1:] = document[1:] != document[:-1]
    return torch.where(opens, index, 0).cummax(0).values


def mean_keys_at_depths(rule: Rule, profile: Sequence[float], mean_keys: float) -> list[float]:
    """Expected visible keys of a query at each depth, m = 1..M, when continuing tokens are spread evenly.

    `profile` is N_m / N_1 for m = 1..M; `mean_keys` x is the mean number of positions up to and including a
    token's own, which is what a Standard decoder sees. "Spread evenly" means that a token's depth depends neither on
    its position nor on its neighbours. Each of the x - 1 earlier tokens then executed exactly k depths with
    probability (N_k - N_{k+1}) / N_1, so by linearity of expectation a query at depth m sees

        (x - 1) * sum_k P(k) * earlier_keys(k, m) + own_keys(m)

    keys. Under the duo-causal rule this is (x - 1)(N_1 + ... + N_m) / N_1 + m, with M = 2 about (1 + f) x; under the
    base-stream rule x - 1 + m; under the others x. A lookahead at depth m + 1 is a query at that depth.
    """
    depth = len(profile)
    stops = [here - there for here, there in zip(profile, [*profile[1:], 0.0], strict=True)]
    table, own = earlier_keys(rule, depth), own_keys(rule, depth)
    return [
        (mean_keys - 1) * sum(stop * row[m] for stop, row in zip(stops, table, strict=True)) + own[m]
        for m in range(depth)
    ]


def depth_profile(continue_fractions: Sequence[float], max_depth: int, routed: bool) -> list[float]:
    """N_m / N_1 for m = 1..M; `routed` is false where every token runs to the ceiling."""
    fractions = [float(fraction) for fraction in continue_fractions]
    if not routed:
        if fractions:
            raise ConfigError("Every token runs to the ceiling here; leave the continue fractions out.")
        return [1.0] * max_depth
    if len(fractions) != max_depth - 1:
        raise ConfigError(
            f"A ceiling of {max_depth} needs {max_depth - 1} continue fractions "
            f"(tokens that reach depths 2 to {max_depth}, each over all tokens), not {len(fractions)}."
        )
    profile = [1.0, *fractions]
    if any(not 0 <= late <= early for early, late in pairwise(profile)):
        raise ConfigError(
            "Continue fractions are of all tokens: each lies between 0 and the one before it (at most 1)."
        )
    return profile
