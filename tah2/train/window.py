"""What happened since the last logged step, as sums that survive an interruption between two logged steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from tah2.compute.train import TrainCounts
from tah2.train.depth_stats import DepthStats
from tah2.train.parallel import World


@dataclass
class Window:
    """Sums of one rank; `pooled` gives those of all."""

    stats: DepthStats
    counts: TrainCounts
    seconds: float = 0.0
    gradient_norm: float = 0.0
    """Of the last step, before clipping."""

    @classmethod
    def new(cls, ceiling: int, device: torch.device | str = "cpu") -> Window:
        return cls(DepthStats.zero(ceiling, device), TrainCounts.zero(ceiling))

    def pooled(self, world: World) -> Window:
        """Every rank calls this."""
        counts = self.counts.pooled(world.sum_tensor)
        return Window(self.stats.pooled(world.group), counts, self.seconds, self.gradient_norm)

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` turns back exactly."""
        return {"stats": self.stats.to_tensor().tolist(), "counts": asdict(self.counts), "seconds": self.seconds}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], ceiling: int, device: torch.device | str = "cpu") -> Window:
        stats = torch.tensor(values["stats"], dtype=torch.float64, device=device)
        counts = {field.name: _tuples(values["counts"][field.name]) for field in fields(TrainCounts)}
        return cls(DepthStats.from_tensor(stats, ceiling), TrainCounts(**counts), values["seconds"])


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
