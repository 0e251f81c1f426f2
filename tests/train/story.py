"""What a training scheme computes, told token by token with full logits, loops over tokens and ordinary autograd.

The passes are those of `tests.model.reference_loop`, here with gradient. Every token of depth m runs depth m + 1 once
more as a lookahead, whether it continued or not: the paper's way, N_m tokens instead of the N_m - N_{m+1} that stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tah2.data.packing import IGNORE, PackedBatch
from tah2.model.loop import LoopedDecoder
from tests.model.reference_loop import Span, next_input, visible_to

Decide = Callable[["Tale", int, float], bool]
"""(the token's story so far, depth, continue probability) -> does it go on?"""


@dataclass
class Tale:
    """One token. Depth m is at place m - 1 of every list."""

    index: int
    target: int
    depth: int = 0
    logprobs: list[Tensor] = field(default_factory=list)
    """log q^(m), `[V]`, with gradient"""
    logits: list[Tensor] = field(default_factory=list)
    """the gate's, below the ceiling"""
    beyond: list[float] = field(default_factory=list)
    """l^(m+1) of a lookahead after depth m, below the ceiling"""

    @property
    def supervised(self) -> bool:
        return self.target != IGNORE

    @property
    def losses(self) -> list[Tensor]:
        return [-logprob[self.target] for logprob in self.logprobs]

    @property
    def gains(self) -> list[float]:
        return [float(here.detach()) - beyond for here, beyond in zip(self.losses, self.beyond, strict=False)]

    def right(self, depth: int) -> bool:
        return int(self.logprobs[depth - 1].argmax()) == self.target


def tell(model: LoopedDecoder, batch: PackedBatch, decide: Decide) -> list[Tale]:
    """The supervised tokens' stories, after all documents ran."""
    told = []
    for number in range(batch.documents):
        rows = (batch.document == number).nonzero()[:, 0].tolist()
        told += _document(model, batch, rows, decide)
    return [tale for tale in told if tale.supervised]


def _document(model: LoopedDecoder, batch: PackedBatch, rows: list[int], decide: Decide) -> list[Tale]:
    ceiling = model.ceiling()
    first, last = model.looped.start, model.looped.stop
    before, middle, after = (Span(model, layers) for layers in (range(first), model.looped, range(last, 99)))
    told: list[Tale] = []
    for t, row in enumerate(rows):
        tale = Tale(row, int(batch.targets[row]))
        embedding = model.embed_tokens.weight[batch.ids[row]]
        anchor = before.run(embedding, (t, 1), [(s, 1) for s in range(t)])
        x = model.reentry.first(anchor[None])[0]
        while True:
            tale.depth = m = tale.depth + 1
            state = middle.run(x, (t, m), visible_to(model, told, t, m))
            if not model.kind.loops_middle:
                state = model.norm(state)
                tale.logprobs.append((model.head_weight @ state).log_softmax(-1))
            if m == ceiling:
                break
            known = tale.logprobs[-1].detach() if tale.logprobs else embedding
            x = next_input(model, anchor, state, known)
            goes_on = True
            if model.gate is not None:
                top = known.exp().sort(descending=True).values[: model.gate.top_k]
                tale.logits.append(model.gate(embedding[None], state[None], top[None])[0])
                with torch.no_grad():
                    probed = middle.run(x, (t, m + 1), visible_to(model, told, t, m + 1), keep=False)
                    logprob = (model.head_weight @ model.norm(probed)).log_softmax(-1)
                    tale.beyond.append(-float(logprob[tale.target]) if tale.supervised else math.nan)
                goes_on = decide(tale, m, float(tale.logits[-1].detach().sigmoid()))
            if not goes_on:
                break
        if model.kind.loops_middle:
            state = model.norm(after.run(state, (t, 1), [(s, 1) for s in range(t)]))
            tale.logprobs.append((model.head_weight @ state).log_softmax(-1))
        told.append(tale)
    return told


def by_threshold(model: LoopedDecoder) -> Decide:
    return lambda tale, m, g: g >= model.loop.exit_threshold


def always(tale: Tale, m: int, g: float) -> bool:
    return True


def oracle(tale: Tale, m: int, g: float) -> bool:
    return tale.supervised and not tale.right(1)


def mixture_loss(tale: Tale) -> Tensor:
    """-log sum_m omega^(m) q^(m)[y*], the last depth taking what is left."""
    reach, likelihood = torch.tensor(1.0), torch.tensor(0.0)
    for m in range(1, tale.depth):
        g = tale.logits[m - 1].sigmoid()
        likelihood = likelihood + reach * (1 - g) * tale.logprobs[m - 1][tale.target].exp()
        reach = reach * g
    return -(likelihood + reach * tale.logprobs[-1][tale.target].exp()).log()


@dataclass
class Labels:
    """Of one depth, by token index."""

    continues: dict[int, bool]
    weight: dict[int, float]
    beta: float


def label(
    tales: list[Tale], ceiling: int, rho: float = 0.99, labels: str = "gain", uniform: bool = False
) -> list[Labels]:
    """The appendix's formulas, one depth after the other."""
    eligible = {tale.index: True for tale in tales}
    found = []
    for m in range(1, ceiling):
        here = [tale for tale in tales if tale.depth >= m]
        ranked = sorted((t.gains[m - 1] for t in here if eligible[t.index] and t.gains[m - 1] > 0), reverse=True)
        cut = 0.0
        for i in range(len(ranked)):
            cut = ranked[i]
            if sum(ranked[: i + 1]) >= rho * sum(ranked):
                break
        wish = {
            "gain": lambda t, cut=cut, some=bool(ranked), m=m: some and t.gains[m - 1] >= cut,
            "top1": lambda t, m=m: not t.right(m),
            "oracle": lambda t: not t.right(1),
        }[labels]
        continues = {t.index: eligible[t.index] and wish(t) for t in here}
        weight = {
            t.index: 1.0 if uniform else min(max(abs(t.gains[m - 1] - cut), 1e-6), 1.0) if eligible[t.index] else 1e-6
            for t in here
        }
        yes = sum(continues.values())
        no = len(here) - yes
        found.append(Labels(continues, weight, no / yes if yes and no else 1.0))
        eligible.update(continues)
    return found


def decider_loss(tales: list[Tale], labels: list[Labels]) -> Tensor:
    """The sum over depths and tokens of w BCE(g, c), not yet divided."""
    total = torch.tensor(0.0)
    for m, depth in enumerate(labels, start=1):
        for tale in tales:
            if tale.depth >= m:
                g, c = tale.logits[m - 1].sigmoid(), depth.continues[tale.index]
                total = total - depth.weight[tale.index] * (depth.beta * g.log() if c else (1 - g).log())
    return total
