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


class TargetReader:
    """Target log-probabilities (differentiable), top-1 tokens, and the most probable tokens where a part asks.

    No dataclass: FSDP2 looks into dataclasses among the arguments of a forward for inputs that require gradient. It
    would take the head's weight for one, and close the gradients of its unit as soon as that input's is known.
    """

    def __init__(self, weight: Tensor, targets: Tensor, every_depth: bool) -> None:
        """weight `[V, d]`; targets long `[N]`, -100 where there is none."""
        self.weight, self.targets, self.every_depth = weight, targets, every_depth

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> TargetReading:
        reading = read_head(state, self.weight, self.targets[index], top_k=top_k)
        predicted = Predicted(reading.top_tokens, reading.top_probs) if top_k else None
        return TargetReading(Measured(index, reading.target_logprob, reading.top_token), predicted)
