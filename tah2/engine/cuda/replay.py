"""A call on tensors of one shape that is recorded once and then replayed: one launch instead of hundreds.

`rerun` is the plain twin of `Graphs`: the same held inputs, and the call itself again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Call = Callable[[], Tensor]
Capture = Callable[[Call], Call]
"""Takes a call without arguments, whose inputs are tensors that stay where they are; returns it recorded."""
Recorder = Callable[[], Capture]
"""Opens a place for recordings, which is closed when the last of them is gone."""

WARM_UPS = 2
"""Calls before a recording: compilers compile and libraries make their handles in them."""


def rerun() -> Capture:
    return lambda call: call


class Graphs:
    """Recorded calls that share one stream and one memory: an output lasts until the next replay of any of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream, self._memory = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(self, call: Call) -> Call:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    call()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
                out = call()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class Replay:
    """`function` of tensors whose first axis counts rows, recorded at `rows` rows; fewer are filled up with
    `padding` (one value per input)."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        rows: int,
        inputs: Sequence[Tensor],
        padding: Sequence[float],
        capture: Capture,
    ) -> None:
        self.padding = padding
        self.held = [
            torch.full((rows, *given.shape[1:]), fill, dtype=given.dtype, device=given.device)
            for given, fill in zip(inputs, padding, strict=True)
        ]
        self._written = 0
        """Rows of `held` that are not padding."""
        self._fill(inputs)
        self._call = capture(lambda: function(*self.held))

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The function's output for the rows of the inputs, as a tensor of its own."""
        self._fill(inputs)
        return self._call()[: len(inputs[0])].clone()

    def _fill(self, inputs: Sequence[Tensor]) -> None:
        rows = len(inputs[0])
        for held, given, fill in zip(self.held, inputs, self.padding, strict=True):
            held[:rows].copy_(given)
            held[rows : self._written].fill_(fill)
        self._written = rows
