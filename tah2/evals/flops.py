"""Decoding FLOPs of a recorded response, and of every beginning of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tah2.compute.keys import keys_at_depths
from tah2.compute.percall import Work, forward, inference_head_every_depth, per_call
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.evals.records import SampleRecord
from tah2.model.kinds import kind_of

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FlopsModel:
    """What a model's tokens cost; `ceiling` is that of the run, by default the configuration's."""

    backbone: BackboneConfig
    loop: LoopConfig
    ceiling: int | None = None

    def of_beginnings(self, prompt_depth_counts: list[int], depths: list[int]) -> Ints:
        """[i]: FLOPs of decoding the first i + 1 output tokens, `[len(depths)]`.

        Output token i + 1 is drawn from the pass of output token i, whose depth is depths[i + 1]; the first one
        belongs to the prompt. Of the prompt only the keys that it leaves count, and their order does not matter.
        """
        if not depths:
            return np.zeros(0, dtype=np.int64)
        kind = kind_of(self.loop)
        ceiling = kind.ceiling(self.loop, self.ceiling)
        prompt = np.repeat(np.arange(1, len(prompt_depth_counts) + 1), prompt_depth_counts)
        executed = torch.from_numpy(np.concatenate([prompt, np.asarray(depths[1:], dtype=np.int64)]))
        keys, position = keys_at_depths(kind.rule, executed, ceiling)
        own, keys, position = executed[len(prompt) :], keys[len(prompt) :], position[len(prompt) :]
        ran = (own[:, None] >= torch.arange(1, ceiling + 1)).long()
        work = Work(_columns(ran.cumsum(0)), _columns((keys * ran).cumsum(0)), _columns(position.cumsum(0)[:, None])[0])
        head_every_depth = inference_head_every_depth(kind, self.backbone, self.loop)
        total = forward(per_call(self.backbone, self.loop), work, head_every_depth).total
        return np.concatenate([[0], np.asarray(total, dtype=np.int64)])

    def of(self, record: SampleRecord) -> int | None:
        """FLOPs of a whole response; None where its depths are unknown."""
        if not record.depths or not record.prompt_depth_counts:
            return None
        return int(self.of_beginnings(record.prompt_depth_counts, record.depths)[-1])


def _columns(sums: torch.Tensor) -> list[Any]:
    """Running sums `[N, M]` as M arrays: the accounting is linear, so it prices all beginnings at once."""
    return list(sums.T.numpy())
