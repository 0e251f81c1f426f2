"""What a sample has cost while it is being written."""

from __future__ import annotations

from collections.abc import Sequence

from tah2.compute.decode import DecodeMeter
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig


class Costs:
    """FLOPs of one sample so far, as it ran and as the plain model would have run: `decode_flops` token by token."""

    def __init__(
        self, backbone: BackboneConfig, loop: LoopConfig, prompt_depths: Sequence[int], max_depth: int | None
    ) -> None:
        self._looped = DecodeMeter(backbone, loop, prompt_depths, max_depth)
        self._plain = DecodeMeter(backbone, LoopConfig("standard"), [1] * len(prompt_depths))
        self._drawn = False

    def add(self, depths: Sequence[int]) -> tuple[int, int]:
        """The next output tokens took `depths` iterations; returns both sums. The first token belongs to the prompt."""
        for depth in depths if self._drawn else depths[1:]:
            self._looped.token(depth)
            self._plain.token(1)
        self._drawn = self._drawn or bool(depths)
        return self._looped.total, self._plain.total
