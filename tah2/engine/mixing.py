"""The mixture of one token's depths, one depth at a time.

`tah2.model.output.mix` has all depths at hand; a decoding engine has one per pass. What a token's earlier depths left
is its *share*; `carried` makes the share that the next depth finds, `stopped` the distribution of a token that stops.
Both give exactly what `mix` gives, in the same operations. At depth 1 a stopping token keeps its logits untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tah2.model.kinds import Output


def stopped(output: Output, logits: Tensor, share: Tensor, depth: Tensor, log_survival: Tensor) -> Tensor:
    """Distributions of tokens that stop at `depth` `[n]` > 1, fp32 `[n, vocabulary]`; mixtures as log-probabilities.

    `log_survival` `[n]` is the logarithm of the product of the continue probabilities of earlier depths.
    """
    if output is Output.LAST:
        return logits
    own = logits.log_softmax(-1)
    if output is Output.UNIFORM_MIXTURE:
        return torch.logaddexp(share, own) - depth.float().log()[:, None]
    return torch.logaddexp(share, log_survival[:, None] + own)


def carried(output: Output, logits: Tensor, share: Tensor | None, log_weight: Tensor) -> Tensor | None:
    """The share of tokens that go on; `share` is None after depth 1.

    `log_weight` `[n]` is the logarithm of this depth's stopping weight.
    """
    if output is Output.LAST:
        return None
    own = logits.log_softmax(-1)
    if output is Output.STOPPING_MIXTURE:
        own = log_weight[:, None] + own
    return own if share is None else torch.logaddexp(share, own)


class Row(NamedTuple):
    """One row of a table that several tokens share, so that taking all of them copies nothing."""

    table: Tensor
    at: int

    @property
    def value(self) -> Tensor:
        return self.table[self.at]


def gather(rows: Sequence[Row]) -> Tensor:
    """The rows as one tensor; the table itself where they are all of it, in order."""
    table = rows[0].table
    if len(rows) == len(table) and all(row.table is table and row.at == i for i, row in enumerate(rows)):
        return table
    return torch.stack([row.value for row in rows])
