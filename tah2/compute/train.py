"""FLOPs of training: forward and backward (three forwards), and the no-gradient lookahead that makes the labels.

The lookahead is reported twice. `label_paper` re-runs all N_m tokens of depth m at depth m + 1, as the paper
counts; `label_actual` runs only the N_m - N_{m+1} tokens that stopped, whose losses are the same because the
executed depth-(m+1) keys are still there. Activation checkpointing is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tah2.compute.decode import check_mean_keys
from tah2.compute.keys import depth_profile, keys_at_depths, mean_keys_at_depths
from tah2.compute.percall import PerCall, Work, forward, per_call
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.kinds import LoopKind, kind_of
from tah2.visibility import Rule


@dataclass(frozen=True)
class TrainFlops:
    forward_backward: float
    label_paper: float
    label_actual: float

    @property
    def total_paper(self) -> float:
        return self.forward_backward + self.label_paper

    @property
    def total_actual(self) -> float:
        return self.forward_backward + self.label_actual


@dataclass(frozen=True)
class TrainCounts:
    """What a trainer ran; counts of micro-batches, ranks and steps add up with `+`.

    Tuples over depth have M entries; those of a lookahead have M - 1, for lookaheads after depths m = 1..M - 1.
    """

    tokens: tuple[int, ...]
    """N_m: tokens that executed depth m."""
    pairs: tuple[int, ...]
    """A_m: their query-key pairs at depth m."""
    once: int
    """Query-key pairs of layers that run once per token."""
    lookahead_tokens_paper: tuple[int, ...]
    """N_m: every token of depth m, run again at depth m + 1."""
    lookahead_pairs_paper: tuple[int, ...]
    """The paper's A~_{m+1}."""
    lookahead_tokens_actual: tuple[int, ...]
    """Tokens whose lookahead ran: those that stopped at depth m and need a label."""
    lookahead_pairs_actual: tuple[int, ...]

    @classmethod
    def zero(cls, max_depth: int) -> TrainCounts:
        none, after = (0,) * max_depth, (0,) * (max_depth - 1)
        return cls(none, none, 0, after, after, after, after)

    @classmethod
    def of(
        cls, rule: Rule, document: Tensor, executed: Tensor, max_depth: int, supervised: Tensor | None = None
    ) -> TrainCounts:
        """Counts of one packed micro-batch.

        `document` `[T]` names each token's document (tokens of a document are neighbours, in order of position);
        `executed` `[T]` holds executed depths; `supervised` `[T]` bool restricts the lookaheads that ran to tokens
        that need a label (all by default).
        """
        keys, position = keys_at_depths(rule, executed, max_depth, document)
        ran = executed[:, None] >= torch.arange(1, max_depth + 1, device=executed.device)
        looked = ran[:, :-1] & ~ran[:, 1:]
        if supervised is not None:
            looked = looked & supervised[:, None]
        masks = (ran, ran[:, :-1], looked)
        seen = (keys, keys[:, 1:], keys[:, 1:])
        tokens = [tuple(mask.sum(0).tolist()) for mask in masks]
        pairs = [tuple((mask * key).sum(0).tolist()) for mask, key in zip(masks, seen, strict=True)]
        return cls(tokens[0], pairs[0], int(position.sum()), tokens[1], pairs[1], tokens[2], pairs[2])

    @property
    def max_depth(self) -> int:
        return len(self.tokens)

    def pooled(self, add_up: Callable[[Tensor], Tensor]) -> TrainCounts:
        """The sum over ranks; `add_up` sums a long tensor over them."""
        looked = (self.lookahead_tokens_paper, self.lookahead_pairs_paper)
        ran = (self.lookahead_tokens_actual, self.lookahead_pairs_actual)
        rows = [self.tokens, self.pairs, (self.once,), *looked, *ran]
        summed = add_up(torch.tensor([value for row in rows for value in row])).split([len(row) for row in rows])
        tokens, pairs, once, *after = (tuple(part.tolist()) for part in summed)
        return TrainCounts(tokens, pairs, once[0], *after)

    def __add__(self, other: TrainCounts) -> TrainCounts:
        if self.max_depth != other.max_depth:
            raise ValueError(f"Counts of ceilings {self.max_depth} and {other.max_depth} cannot be added.")
        return TrainCounts(
            tokens=_plus(self.tokens, other.tokens),
            pairs=_plus(self.pairs, other.pairs),
            once=self.once + other.once,
            lookahead_tokens_paper=_plus(self.lookahead_tokens_paper, other.lookahead_tokens_paper),
            lookahead_pairs_paper=_plus(self.lookahead_pairs_paper, other.lookahead_pairs_paper),
            lookahead_tokens_actual=_plus(self.lookahead_tokens_actual, other.lookahead_tokens_actual),
            lookahead_pairs_actual=_plus(self.lookahead_pairs_actual, other.lookahead_pairs_actual),
        )


def _plus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def routes_in_training(kind: LoopKind) -> bool:
    """Do tokens stop early in training? Kinds that run prompts to the ceiling run all known tokens there."""
    return kind.gate is not None and not kind.prefill_runs_all


def training_head_every_depth(kind: LoopKind) -> bool:
    """A loop over the whole stack supervises every depth; a middle loop's head sits behind its one coda."""
    return not kind.loops_middle


def train_flops(
    backbone: BackboneConfig,
    loop: LoopConfig,
    continue_fractions: Sequence[float],
    mean_keys: float,
    tokens: float,
    max_depth: int | None = None,
) -> TrainFlops:
    """Expected training FLOPs over `tokens` tokens, for planning.

    `continue_fractions` are N_2/N_1 .. N_M/N_1, each of all tokens (empty where every token runs to the ceiling in
    training); `mean_keys` is the mean over tokens of the position in the document. A lookahead after depth m is a
    query at depth m + 1; see `mean_keys_at_depths` for what is assumed about keys.
    """
    kind = kind_of(loop)
    check_mean_keys(mean_keys)
    if not tokens > 0:
        raise ConfigError(f"The number of training tokens must be positive, not {tokens}.")
    routed = routes_in_training(kind)
    profile = depth_profile(continue_fractions, kind.ceiling(loop, max_depth), routed)
    keys = mean_keys_at_depths(kind.rule, profile, mean_keys)
    executed = [tokens * share for share in profile]
    stopped = [early - late for early, late in pairwise(executed)]
    price, head_every_depth = per_call(backbone, loop), training_head_every_depth(kind)
    work = Work(executed, [n * seen for n, seen in zip(executed, keys, strict=True)], tokens * mean_keys)
    labels = [
        _lookahead(price, n, [count * seen for count, seen in zip(n, keys[1:], strict=True)]) if routed else 0
        for n in (executed[:-1], stopped)
    ]
    return TrainFlops(3 * forward(price, work, head_every_depth).total, *labels)


def train_flops_recorded(backbone: BackboneConfig, loop: LoopConfig, counts: TrainCounts) -> TrainFlops:
    """Training FLOPs of a run from what its trainer recorded; exact integers."""
    kind = kind_of(loop)
    price, head_every_depth = per_call(backbone, loop), training_head_every_depth(kind)
    trained = forward(price, Work(counts.tokens, counts.pairs, counts.once), head_every_depth)
    if not routes_in_training(kind):
        return TrainFlops(3 * trained.total, 0, 0)
    return TrainFlops(
        3 * trained.total,
        _lookahead(price, counts.lookahead_tokens_paper, counts.lookahead_pairs_paper),
        _lookahead(price, counts.lookahead_tokens_actual, counts.lookahead_pairs_actual),
    )


def _lookahead(price: PerCall, tokens: Sequence[float], pairs: Sequence[float]) -> float:
    """One more iteration without gradient for each token, and the head that reads its loss."""
    once_more = price.reentry + price.looped * price.layer + price.head
    return once_more * sum(tokens) + price.looped * price.layer_key * sum(pairs)
