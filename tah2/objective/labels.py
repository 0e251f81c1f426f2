"""Continuation labels and their weights, recomputed from the current backbone for every batch.

    c^(0) = 1,   c^(m) = a^(m) c^(m-1) [delta^(m) >= delta_cut^(m)]
    w^(m) = clip(|delta^(m) - delta_cut^(m)|, 1e-6, 1)   where c^(m-1) = 1,   1e-6 where c^(m-1) = 0

Once a token is told to stop it stays told so. The cutoff of depth m ranks only tokens with a^(m) = c^(m-1) = 1.
Label schemes say which tokens *want* to continue; inheritance, cutoffs and weights are the same for all of them.
Labels, cutoffs and weights are constants of backpropagation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tah2.config.strict import ConfigError, suggestion
from tah2.objective.cutoff import Cutoff, coverage_cutoff
from tah2.objective.evidence import Evidence

SMALLEST_WEIGHT = 1e-6
LARGEST_WEIGHT = 1.0


@dataclass(frozen=True)
class Case:
    """All that a scheme may look at when it labels one depth; tensors `[n]` over the depth's supervised tokens."""

    gain: Tensor
    cutoff: Cutoff
    eligible: Tensor
    """bool: c^(m-1) = 1."""
    top1_correct: Tensor
    correct_at_first: Tensor
    """bool: the top-1 prediction of depth 1 is the target."""


LabelScheme = Callable[[Case], Tensor]
"""Case -> bool `[n]`: who would continue, inheritance aside."""
WeightScheme = Callable[[Case], Tensor]
"""Case -> fp32 `[n]`: the weight of each token's decision."""


def iteration_gain(case: Case) -> Tensor:
    """Continue where another iteration gains at least the cutoff; nobody if no gain was positive."""
    return (case.gain >= case.cutoff.value) & case.cutoff.any_positive


def top1_mismatch(case: Case) -> Tensor:
    """Continue where this depth's most probable token is not the target."""
    return ~case.top1_correct


def first_depth_mismatch(case: Case) -> Tensor:
    """Continue, at every depth, where depth 1's most probable token is not the target (the oracle of TaH)."""
    return ~case.correct_at_first


def cost_sensitive(case: Case) -> Tensor:
    """The distance of the gain from the cutoff, clipped; the smallest weight for inherited stops."""
    weight = (case.gain - case.cutoff.value).abs().clamp(SMALLEST_WEIGHT, LARGEST_WEIGHT)
    return weight.where(case.eligible, SMALLEST_WEIGHT)


def uniform(case: Case) -> Tensor:
    """One for every decision."""
    return torch.ones_like(case.gain)


LABEL_SCHEMES: dict[str, LabelScheme] = {
    "iteration-gain": iteration_gain,
    "top1-mismatch": top1_mismatch,
    "first-depth-mismatch": first_depth_mismatch,
}
WEIGHT_SCHEMES: dict[str, WeightScheme] = {"cost-sensitive": cost_sensitive, "uniform": uniform}


def label_scheme(name: str) -> LabelScheme:
    """The label scheme of this name."""
    if name not in LABEL_SCHEMES:
        raise ConfigError(f"Unknown label scheme {name!r}{suggestion(name, LABEL_SCHEMES)}.")
    return LABEL_SCHEMES[name]


def weight_scheme(name: str) -> WeightScheme:
    """The weight scheme of this name."""
    if name not in WEIGHT_SCHEMES:
        raise ConfigError(f"Unknown weight scheme {name!r}{suggestion(name, WEIGHT_SCHEMES)}.")
    return WEIGHT_SCHEMES[name]


@dataclass(frozen=True)
class DepthLabels:
    """Supervision of the decider at one depth, over the tokens of that depth's `Evidence`."""

    continues: Tensor
    """bool `[n]`: c^(m)."""
    weight: Tensor
    """fp32 `[n]`: w^(m)."""
    cutoff: Cutoff


@torch.no_grad()
def continuation_labels(
    evidence: Sequence[Evidence],
    tokens: int,
    *,
    coverage: float = 0.99,
    labels: LabelScheme = iteration_gain,
    weights: WeightScheme = cost_sensitive,
    group: dist.ProcessGroup | None = None,
) -> list[DepthLabels]:
    """Label depths 1 .. M-1 of a batch of `tokens` tokens; cutoffs are pooled over `group`, depth by depth."""
    if not evidence:
        return []
    first = evidence[0]
    still_continues = torch.zeros(tokens, dtype=torch.bool, device=first.token.device)
    still_continues[first.token] = True
    correct_at_first = torch.zeros_like(still_continues)
    correct_at_first[first.token] = first.top1_correct
    labelled = []
    for depth in evidence:
        eligible = still_continues[depth.token]
        cutoff = coverage_cutoff(depth.gain[eligible], coverage, group)
        case = Case(depth.gain, cutoff, eligible, depth.top1_correct, correct_at_first[depth.token])
        continues = eligible & labels(case)
        labelled.append(DepthLabels(continues, weights(case), cutoff))
        still_continues[depth.token] = continues
    return labelled
