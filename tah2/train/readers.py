"""What training reads from the LM head inside the loop, never all logits at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tah2.model.reentry import Predicted
from tah2.objective.evidence import Measured
from tah2.objective.head import read_head


@dataclass(frozen=True)
class TargetReading:
    """One pass's readings; `measured.token` indexes the batch."""

    measured: Measured
    predicted: Predicted | None


@dataclass
class TargetReader:
    """Target log-probabilities (differentiable), top-1 tokens, and the most probable tokens where a part asks."""

    weight: Tensor
    """`[V, d]`"""
    targets: Tensor
    """long `[N]`; -100 where there is no target"""
    every_depth: bool

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> TargetReading:
        reading = read_head(state, self.weight, self.targets[index], top_k=top_k)
        predicted = Predicted(reading.top_tokens, reading.top_probs) if top_k else None
        return TargetReading(Measured(index, reading.target_logprob, reading.top_token), predicted)
