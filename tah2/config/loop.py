"""The description of a loop that a checkpoint carries: its kind, its ceiling and its few options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tah2.config.backbone import BackboneConfig
from tah2.config.strict import ConfigError


@dataclass(frozen=True)
class LoopConfig:
    """Widths left at None follow the paper: updater, decider and top-k are as wide as the backbone."""

    kind: str = "tah2"
    max_depth: int = 2
    """Depth ceiling M; a call may run under another ceiling than the trained one."""
    exit_threshold: float = 0.5
    """Continue while the decider's probability (the exit gate's survival) is not below this value."""
    reentry: str | None = None
    """How the next depth's input is made, where it differs from the kind's own ("top-k-embedding")."""
    output: Literal["stopping-mixture", "uniform-mixture", "last"] | None = None
    """How the depths' predictions are combined, where it differs from the kind's own."""
    updater_width: int | None = None
    decider_width: int | None = None
    decider_top_k: int | None = None
    embedding_top_k: int = 100
    prelude_layers: int | None = None
    coda_layers: int | None = None
    """Layers run once before and after a looped middle block; a quarter of the stack each by default."""

    def __post_init__(self) -> None:
        if self.max_depth < 1:
            raise ConfigError(f"max_depth must be at least 1, not {self.max_depth}.")
        for name in ("updater_width", "decider_width", "decider_top_k", "embedding_top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")


def middle_block(loop: LoopConfig, backbone: BackboneConfig) -> tuple[int, int]:
    """The looped layers [first, last) when only the middle of the stack repeats (7 + 14 + 7 of 28 by default)."""
    layers = backbone.num_layers
    prelude = layers // 4 if loop.prelude_layers is None else loop.prelude_layers
    coda = layers // 4 if loop.coda_layers is None else loop.coda_layers
    if prelude < 0 or coda < 0 or prelude + coda >= layers:
        raise ConfigError(
            f"{prelude} prelude and {coda} coda layers leave nothing to loop in a backbone of {layers} layers."
        )
    return prelude, layers - coda
