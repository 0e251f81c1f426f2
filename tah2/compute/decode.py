"""FLOPs of decoding: exact from recorded depths, or expected per token for planning.

Decoding processes positions t = 1..N after a prompt of P tokens. N is the number of output tokens minus one: the
first output token is sampled from the prefill, which is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from tah2.compute.keys import depth_profile, earlier_keys, keys_at_depths, mean_keys_at_depths, own_keys
from tah2.compute.percall import Breakdown, Work, forward, inference_head_every_depth, per_call
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.kinds import kind_of


def decode_flops(
    backbone: BackboneConfig,
    loop: LoopConfig,
    prompt_depths: Sequence[int],
    decoded_depths: Sequence[int],
    max_depth: int | None = None,
) -> int:
    """FLOPs of decoding one response, exactly.

    `prompt_depths` are r_1..r_P, the depths whose keys each prompt token keeps; `decoded_depths` are m_1..m_N, the
    depths of the positions processed after the prefill (one fewer than the output tokens); `max_depth` is the
    ceiling of that run, by default the configuration's.
    """
    kind = kind_of(loop)
    ceiling = kind.ceiling(loop, max_depth)
    executed = torch.tensor([*prompt_depths, *decoded_depths], dtype=torch.long)
    keys, position = keys_at_depths(kind.rule, executed, ceiling)
    own, keys, position = executed[len(prompt_depths) :], keys[len(prompt_depths) :], position[len(prompt_depths) :]
    ran = own[:, None] >= torch.arange(1, ceiling + 1)
    work = Work(ran.sum(0).tolist(), (keys * ran).sum(0).tolist(), int(position.sum()))
    return int(forward(per_call(backbone, loop), work, inference_head_every_depth(kind, backbone, loop)).total)


class DecodeMeter:
    """Counts one response as it is decoded: `decode_flops` one token at a time, O(M) each."""

    def __init__(
        self,
        backbone: BackboneConfig,
        loop: LoopConfig,
        prompt_depths: Iterable[int] = (),
        max_depth: int | None = None,
    ) -> None:
        kind = kind_of(loop)
        self.max_depth = kind.ceiling(loop, max_depth)
        self._price = per_call(backbone, loop)
        self._head_every_depth = inference_head_every_depth(kind, backbone, loop)
        self._earlier = earlier_keys(kind.rule, self.max_depth)
        self._own = own_keys(kind.rule, self.max_depth)
        self._keys = [0] * self.max_depth
        """Keys of all tokens so far that a query at depth m reads, for m = 1..M."""
        self._position = 0
        self.total = 0
        """FLOPs of every token metered so far."""
        for depth, count in Counter(prompt_depths).items():
            self.prefilled(depth, count)

    def prefilled(self, depth: int, count: int = 1) -> None:
        """Tokens whose keys become visible and whose own cost is not counted."""
        if not 1 <= depth <= self.max_depth:
            raise ValueError(f"A recorded depth must lie between 1 and the ceiling {self.max_depth}, not {depth}.")
        self._position += count
        for m, keys in enumerate(self._earlier[depth - 1]):
            self._keys[m] += keys * count

    def token(self, depth: int) -> int:
        """The next token ran `depth` iterations: its FLOPs, which also join `total`."""
        ran = [m < depth for m in range(self.max_depth)]
        pairs = [(seen + own) * m for seen, own, m in zip(self._keys, self._own, ran, strict=True)]
        self.prefilled(depth)
        flops = int(forward(self._price, Work(ran, pairs, self._position), self._head_every_depth).total)
        self.total += flops
        return flops


def decode_per_token(
    backbone: BackboneConfig,
    loop: LoopConfig,
    continue_fractions: Sequence[float],
    mean_keys: float,
    max_depth: int | None = None,
) -> Breakdown:
    """Expected FLOPs of decoding one token, for planning.

    `continue_fractions` are N_2/N_1 .. N_M/N_1, each of all tokens (empty where every token runs to the ceiling);
    `mean_keys` is the mean context length, the token itself included. See `mean_keys_at_depths` for what is assumed.
    """
    kind = kind_of(loop)
    check_mean_keys(mean_keys)
    profile = depth_profile(continue_fractions, kind.ceiling(loop, max_depth), routed=kind.gate is not None)
    keys = mean_keys_at_depths(kind.rule, profile, mean_keys)
    work = Work(profile, [share * seen for share, seen in zip(profile, keys, strict=True)], mean_keys)
    return forward(per_call(backbone, loop), work, inference_head_every_depth(kind, backbone, loop))


def check_mean_keys(mean_keys: float) -> None:
    if not mean_keys >= 1:
        raise ConfigError(f"Mean visible keys must be at least 1 (a token sees itself), not {mean_keys}.")
