"""What every depth says of every supervised token, under teacher forcing.

    l^(m) = -log q^(m)[y*]        loss of depth m
    g^(m)                         continue probability after depth m
    m_t                           iterations that the token executed

Tokens follow the decider's own routes. A token that stopped at m_t < M also has l^(m_t + 1), from a lookahead: what one
more pass would have said. Deeper losses are unknown and NaN. `run_all` asks instead what a fixed-depth loop would
have done: every token runs to the ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tah2.data.packing import IGNORE, PackedBatch
from tah2.model.loop import LoopedDecoder, LoopRun, LoopSettings
from tah2.objective.head import read_head
from tah2.train.readers import TargetReader
from tah2.train.schemes import tokens_of

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class TokenTable:
    """N supervised tokens of some documents, up to M depths each."""

    loss: Floats
    """`[N, M]`: l^(m); NaN where neither a pass nor a lookahead measured it"""
    continue_prob: Floats
    """`[N, M - 1]`: g^(m); NaN where nobody asked"""
    executed: Integers
    """`[N]`: m_t"""
    document: Integers
    """`[N]`: number of the token's document, over all batches"""
    position: Integers
    """`[N]`: of the entry that predicts the token"""
    target: Integers
    """`[N]`: the token itself"""
    tag: Integers
    """`[N]`: its kind, where the data tells kinds apart, else 0"""

    def __len__(self) -> int:
        return len(self.executed)

    @property
    def depths(self) -> int:
        return int(self.loss.shape[1])

    def gain(self, depth: int) -> Floats:
        """`[N]`: l^(m) - l^(m+1), what a pass after `depth` does for each token; NaN where unknown."""
        return self.loss[:, depth - 1] - self.loss[:, depth]

    @staticmethod
    def cat(tables: Sequence[TokenTable]) -> TokenTable:
        columns = ([getattr(table, field.name) for table in tables] for field in fields(TokenTable))
        return TokenTable(*(np.concatenate(column) for column in columns))


Progress = Callable[[int], None]
"""Called with the number of tokens that a batch held, once it is measured."""


def measure_tokens(
    decoder: LoopedDecoder,
    batches: Sequence[PackedBatch],
    *,
    run_all: bool = False,
    max_depth: int | None = None,
    attention: str = "auto",
    progress: Progress | None = None,
) -> TokenTable:
    """Losses per depth, continue probabilities and depths of every token of `batches` that has a target."""
    tables: list[TokenTable] = []
    documents = 0
    settings = LoopSettings(max_depth=max_depth, attention=attention)
    was_training = decoder.training
    decoder.eval()
    try:
        for batch in batches:
            if batch.is_placeholder:
                continue
            tables.append(_measure(decoder, batch, documents, run_all, settings))
            documents += batch.documents
            if progress is not None:
                progress(len(batch))
    finally:
        decoder.train(was_training)
    if not tables:
        raise ValueError("There is nothing to measure: the data hold no sample.")
    return TokenTable.cat(tables)


@torch.no_grad()
def _measure(
    decoder: LoopedDecoder, batch: PackedBatch, documents: int, run_all: bool, settings: LoopSettings
) -> TokenTable:
    batch = batch.to(decoder.head_weight.device)
    supervised = (batch.targets != IGNORE).nonzero()[:, 0]
    if decoder.kind.loops_middle:
        loss, gate, executed = _by_ceiling(decoder, batch, settings)
    else:
        loss, gate, executed = _along_routes(decoder, batch, run_all, settings)
    tags = torch.zeros_like(batch.targets) if batch.tags is None else batch.tags
    rows = (loss, gate, executed, batch.document + documents, batch.position, batch.targets, tags)
    return TokenTable(*(row[supervised].cpu().numpy() for row in rows))


def _along_routes(
    decoder: LoopedDecoder, batch: PackedBatch, run_all: bool, settings: LoopSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses `[N, M]`, continue probabilities `[N, M - 1]` and executed depths `[N]` of one run and its lookaheads."""
    ceiling, count = decoder.ceiling(settings.max_depth), len(batch)
    unsupervised = batch.targets == IGNORE
    forced = torch.ones_like(unsupervised) if run_all else unsupervised if decoder.kind.prefill_runs_all else None
    settings = LoopSettings(
        max_depth=settings.max_depth, run_all=forced, lookahead=~unsupervised, attention=settings.attention
    )
    run = decoder(tokens_of(batch), TargetReader(decoder.head_weight, batch.targets, True), settings)
    loss = torch.full((count, ceiling), torch.nan, device=batch.ids.device)
    gate = torch.full((count, max(0, ceiling - 1)), torch.nan, device=batch.ids.device)
    for part in (*run.passes, *run.lookaheads):
        loss[part.index, part.depth - 1] = -part.reading.measured.target_logprob.float()
        if part.continue_logit is not None:
            gate[part.index, part.depth - 1] = part.continue_logit.sigmoid()
    return loss, gate, run.executed


def _by_ceiling(decoder: LoopedDecoder, batch: PackedBatch, settings: LoopSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Where a coda follows the loop, depth m says what the model says under the ceiling m: one run per depth."""
    ceiling = decoder.ceiling(settings.max_depth)
    runs: list[LoopRun] = []
    for depth in range(1, ceiling + 1):
        reader = TargetReader(decoder.head_weight, batch.targets, False)
        runs.append(decoder(tokens_of(batch), reader, LoopSettings(max_depth=depth, attention=settings.attention)))
    losses = [-read_head(run.final_state, decoder.head_weight, batch.targets).target_logprob.float() for run in runs]
    nobody = torch.full((len(batch), max(0, ceiling - 1)), torch.nan, device=batch.ids.device)
    return torch.stack(losses, dim=1), nobody, runs[-1].executed
