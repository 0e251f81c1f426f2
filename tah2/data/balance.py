"""Which sample of a global batch goes to which rank and micro-batch.

Every rank computes the whole plan from the lengths alone, so nothing needs to be sent. Ranks get nearly equal
tokens (longest sample first, to the rank with the fewest), and the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

Plan = list[list[list[int]]]
"""`plan[rank][micro_batch]` lists samples of the global batch; an empty list is a placeholder."""


def plan_micro_batches(lengths: Sequence[int], world_size: int, budget: int) -> Plan:
    """Cut a global batch with these token `lengths` into micro-batches of at most `budget` tokens for every rank.

    A single sample longer than the budget makes its own micro-batch.
    """
    per_rank = spread(range(len(lengths)), lengths, world_size)
    packed = [first_fit(samples, lengths, budget) for samples in per_rank]
    count = max(1, *(len(bins) for bins in packed))
    return [_evened(samples, bins, lengths, count, budget) for samples, bins in zip(per_rank, packed, strict=True)]


def spread(samples: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split `samples` into `parts` of nearly equal tokens: longest first, to the part with the fewest."""
    bins: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for sample in _longest_first(samples, lengths):
        lightest = min(range(parts), key=lambda part: (tokens[part], part))
        bins[lightest].append(sample)
        tokens[lightest] += lengths[sample]
    return [sorted(part) for part in bins]


def first_fit(samples: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Few bins of at most `budget` tokens: longest first, into the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in _longest_first(samples, lengths):
        fitting = next((i for i, free in enumerate(room) if lengths[sample] <= free), None)
        if fitting is None:
            bins.append([])
            room.append(budget)
            fitting = len(bins) - 1
        bins[fitting].append(sample)
        room[fitting] -= lengths[sample]
    return [sorted(part) for part in bins]


def _evened(
    samples: Sequence[int], bins: list[list[int]], lengths: Sequence[int], count: int, budget: int
) -> list[list[int]]:
    """`count` micro-batches of even size where that fits the budget, else `bins` and placeholders; largest first.

    Even micro-batches matter for the statistics that are pooled over ranks per micro-batch (cutoffs, class balance).
    """
    even = spread(samples, lengths, count)
    fits = all(sum(lengths[i] for i in part) <= budget or len(part) == 1 for part in even)
    chosen = even if fits else bins + [[] for _ in range(count - len(bins))]
    return sorted(chosen, key=lambda part: -sum(lengths[i] for i in part))


def _longest_first(samples: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(samples, key=lambda sample: (-lengths[sample], sample))
