"""A strand: consecutive tokens of one request that run their depths together.

A decode step is a strand of one token, a prompt chunk a strand of many. Depths run inside a strand, strands follow
one another: a strand's tokens at depth m read what earlier strands executed. A *draft* is a strand whose token is
not certain yet (see `wavefront`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tah2.engine.constraint import LogitsMask
from tah2.engine.kernels import Row
from tah2.engine.pool import Slots
from tah2.engine.slots import Depths, TokenSlots

if TYPE_CHECKING:
    from tah2.engine.request import Request

Floats = NDArray[np.float32]


@dataclass(eq=False)
class Strand:
    request: Request
    start: int
    """Position of the first token."""
    ids: NDArray[np.int64]
    floor: Depths
    """`[n]`: a token continues without being asked below this depth"""
    cap: Depths
    """`[n]`: a token stops at this depth; floor == cap replays a recorded depth"""
    kept_from: int
    """Rows from here on need their mixed distribution."""
    samples: bool
    """The last row's distribution yields the token that comes next."""
    draft: bool = False
    depth: int = 1
    """The depth that the active rows run next."""
    active: NDArray[np.int64] = field(init=False)
    """Rows that run at `depth`; none: the strand has finished."""
    executed: Depths = field(init=False)
    slots: Slots = field(init=False)
    """`[n, M]`: the slot of depth j in column j - 1, or -1"""
    once: Slots = field(init=False)
    """`[n]`: the slot of layers that run once, or -1"""
    survival: Floats = field(init=False)
    log_survival: Floats = field(init=False)
    """`[n]`: product of the continue probabilities so far, and its logarithm as a sum"""
    x: Tensor | None = None
    """The active rows' next input `[active, d]`; None before depth 1."""
    anchor: Tensor | None = None
    """The active rows' prelude output, where layers run once."""
    final: Tensor | None = None
    """States before the coda `[n, d]`, where layers run once."""
    shares: dict[int, Row] = field(default_factory=dict)
    """By kept row: the weighted predictions of the depths that it has passed (see `mixing`)."""
    mixed: dict[int, Row] = field(default_factory=dict)
    """By kept row: its distribution if it stops (or had stopped) at its last executed depth, fp32 `[vocabulary]`."""
    continue_probs: list[float] = field(default_factory=list)
    """Of the last row."""
    depth_logits: list[Tensor] = field(default_factory=list)
    """Of the last row, on request."""
    draw: int | None = None
    """The next token as far as the executed depths tell; final once the strand has finished."""
    mask: LogitsMask | None = None
    """Of a draft: the constraint's state after its token."""

    def __post_init__(self) -> None:
        n = len(self.ids)
        self.active = np.arange(n)
        self.executed = np.zeros(n, dtype=np.int64)
        self.slots = np.full((n, self.request.ceiling), -1, dtype=np.int64)
        self.once = np.full(n, -1, dtype=np.int64)
        self.survival = np.ones(n, dtype=np.float32)
        self.log_survival = np.zeros(n, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def finished(self) -> bool:
        return len(self.active) == 0

    @property
    def rows(self) -> int:
        """Entries of the next pass."""
        return len(self.active)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def token_slots(self) -> TokenSlots:
        """The slots of a finished strand."""
        once = self.once if self.once[0] >= 0 else self.once[:0]
        return TokenSlots(self.executed.copy(), self.slots[self.slots >= 0], once)

    def held(self) -> tuple[list[int], list[int]]:
        """Every slot that the strand holds, whatever its state: looped, once."""
        return self.slots[self.slots >= 0].tolist(), self.once[self.once >= 0].tolist()
