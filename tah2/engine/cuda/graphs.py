"""Decode passes as CUDA graphs behind the runner's seam.

A pass of a few rows is hundreds of small kernels, and launching them takes a GPU longer than running them. Passes
without prompt chunks are recorded per power of two of rows, at first use, and replayed from then on; the gate and the
state update likewise. Other passes run the model's own modules. Between two products a block's small operations are
fused by `torch.compile`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.engine.cuda.attention import paged_attention, try_kernels
from tah2.engine.cuda.replay import Graphs, Recorder, Replay
from tah2.engine.paged import PagedAttention, PassPlan
from tah2.engine.weights import ModelWeights
from tah2.model.decoder import Block
from tah2.model.loop import LoopedDecoder
from tah2.model.reentry import CarryOver, Predicted

Tensors = tuple[Tensor, ...]
MOST_ROWS = 256
"""Larger passes keep a GPU busy without help."""
LISTED_SLOTS = 1 << 20
"""Room for the slot lists of one pass; it doubles when a pass needs more, and passes are then recorded anew."""


class GraphedWeights(ModelWeights):
    """The model's modules, recorded; on a CPU, with `rerun` and the plain attention, their twin."""

    def __init__(self, decoder: LoopedDecoder, recorder: Recorder, paged: PagedAttention, fused: bool) -> None:
        super().__init__(decoder)
        self.paged = paged
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor]] = Block.before
        self._after: Callable[..., Tensor] = Block.after
        if fused:
            self._before = torch.compile(Block.before, dynamic=True)
            self._after = torch.compile(Block.after, dynamic=True)
        self._recorder = recorder
        self._begin(LISTED_SLOTS)

    def _begin(self, slots: int) -> None:
        """Nothing is recorded yet, and a pass may list so many slots."""
        self._replays: dict[Hashable, Replay] = {}
        self._capture = self._recorder()
        self._slots = torch.zeros(slots, dtype=torch.long, device=self.decoder.embed_tokens.weight.device)

    @classmethod
    def on_gpu(cls, decoder: LoopedDecoder) -> ModelWeights:
        """Recorded passes, or the model's own modules where Triton cannot compile."""
        device = decoder.embed_tokens.weight.device
        try:
            try_kernels(device)
        except Exception as error:
            warnings.warn(f"Decoding runs without CUDA graphs, because Triton cannot run here: {error}", stacklevel=2)
            return ModelWeights(decoder)
        return cls(decoder, lambda: Graphs(device).capture, paged_attention, fused=True)

    def behind(self, decoder: LoopedDecoder) -> Self:
        other = super().behind(decoder)
        other._begin(LISTED_SLOTS)
        return other

    def layers(self, x: Tensor, layers: range, cosine: Tensor, sine: Tensor, plan: PassPlan, pool_layer: int) -> Tensor:
        if plan.chunks or len(x) > MOST_ROWS:
            return super().layers(x, layers, cosine, sine, plan, pool_layer)
        self._list(plan.slots)
        pool = plan.pool

        def run(x: Tensor, cosine: Tensor, sine: Tensor, new_slots: Tensor, ends: Tensor) -> Tensor:
            # Rows that only fill up end at 0; as running maxima they end where the last list ends, and see nothing.
            offsets = F.pad(ends.cummax(0).values, (1, 0))
            step = PassPlan(pool, new_slots, len(x), self._slots, offsets, [], self.paged)
            for offset, layer in enumerate(layers):
                block, attend = self.decoder.layers[layer], step.attend(pool_layer + offset)
                x = self._after(block, x, attend(*self._before(block, x, cosine, sine)))
            return x

        inputs = (x, cosine, sine, plan.new_slots, plan.offsets[1:])
        return self._replayed(("layers", pool, layers), run, inputs, (0, 0, 0, pool.spare, 0))

    def reenter(self, anchor: Tensor, state: Tensor, predicted: Predicted | None) -> Tensor:
        if isinstance(self.reentry_part, CarryOver):
            return state

        def run(anchor: Tensor, state: Tensor, *predicted: Tensor) -> Tensor:
            return ModelWeights.reenter(self, anchor, state, Predicted(*predicted) if predicted else None)

        inputs = (anchor, state) if predicted is None else (anchor, state, predicted.tokens, predicted.probabilities)
        return self._replayed(("reenter", len(inputs)), run, inputs, (0, 0, 0, 1)[: len(inputs)])

    def gate(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        def run(embedding: Tensor, state: Tensor, *top: Tensor) -> Tensor:
            return ModelWeights.gate(self, embedding, state, top[0] if top else None)

        inputs = (embedding, state) if top_probabilities is None else (embedding, state, top_probabilities)
        return self._replayed(("gate", len(inputs)), run, inputs, (0,) * len(inputs))

    def _replayed(
        self,
        name: tuple[Hashable, ...],
        run: Callable[..., Tensor],
        inputs: Tensors,
        padding: tuple[int, ...],
    ) -> Tensor:
        """`run(*inputs)`, recorded when `name` is first called with about so many rows."""
        rows = len(inputs[0])
        if rows > MOST_ROWS:
            return run(*inputs)
        rows = 1 << (rows - 1).bit_length()
        if (*name, rows) not in self._replays:
            self._replays[*name, rows] = Replay(run, rows, inputs, padding, self._capture)
        return self._replays[*name, rows](*inputs)

    def _list(self, slots: Tensor) -> None:
        """Put the pass's slot lists where recorded passes look for them."""
        if len(slots) > len(self._slots):
            self._begin(1 << (len(slots) - 1).bit_length())
        self._slots[: len(slots)].copy_(slots)
