"""A request and its life: waiting, running, perhaps preempted and running again, finished.

Of the tokens known so far, `[0, len(lists))` are settled: all their depths have run and their slots stand in the slot
lists; the prefix cache owns `[0, cached)` of them. Strands run what follows. Depths recorded beyond the settled part
(after a preemption) are replayed, not decided again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tah2.engine.constraint import LogitsMask
from tah2.engine.detokenize import Detokenizer
from tah2.engine.outputs import Logprob, RequestMetrics
from tah2.engine.params import SamplingParams
from tah2.engine.prefix import Node
from tah2.engine.slots import Growing, Sight, SlotLists
from tah2.engine.strand import Strand

KEPT_ROWS = 64
"""Rows of a chunk whose distributions are kept for prompt log-probabilities."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    id: str
    """The caller's; samples of one request share it."""
    index: int
    order: int
    """Of arrival; the lower number goes first everywhere."""
    prompt: NDArray[np.int64]
    params: SamplingParams
    seed: int
    max_tokens: int
    ceiling: int
    threshold: float
    sight: Sight
    endings: frozenset[int]
    """Token ids that end the output."""
    runs_all: bool
    """Prompt tokens run to the ceiling."""
    drafts: bool
    """The next token may start before this one has stopped."""
    cache_key: Hashable
    metrics: RequestMetrics
    detokenizer: Detokenizer | None = None
    mask: LogitsMask | None = None

    status: Status = Status.WAITING
    ids: Growing = field(default_factory=Growing)
    """Prompt and output."""
    output: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Executed depths of tokens 0, 1, ...: settled ones and those to be replayed."""
    pending_floor: int = 1
    """The token after the recorded ones is known to reach this depth."""
    lists: SlotLists = field(init=False)
    strands: list[Strand] = field(default_factory=list)
    node: Node | None = None
    cached: int = 0

    output_depths: list[int] = field(default_factory=list)
    continue_probs: list[list[float]] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    depth_logprobs: list[list[dict[int, Logprob]]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.ids.extend(self.prompt)
        self.lists = SlotLists(self.sight)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def remaining(self) -> int:
        """Known tokens that have not settled."""
        return len(self.ids) - len(self.lists)

    @property
    def shareable(self) -> int:
        """How many leading tokens may come from the prefix cache: the last known token runs in any case."""
        if self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt):
            return 0
        return min(len(self.ids) - 1, len(self.prompt)) if self.runs_all else len(self.ids) - 1

    def next_strand(self, most: int) -> Strand:
        """A strand of at most `most` unsettled tokens."""
        start = len(self.lists)
        missing = max(len(self.prompt_logprobs) - 1, start) if self.params.prompt_logprobs is not None else None
        keeps = missing is not None and missing < len(self.prompt) - 1
        count = min(most, self.remaining, KEPT_ROWS if keeps else most)
        samples = start + count == len(self.ids)
        kept = start + count - 1 if samples else start + count
        if keeps and missing is not None:
            kept = min(kept, missing)
        floor = np.ones(count, dtype=np.int64)
        cap = np.full(count, self.ceiling, dtype=np.int64)
        if self.runs_all:
            floor[: max(0, len(self.prompt) - start)] = self.ceiling
        recorded = self.depths[start : start + count]
        floor[: len(recorded)] = cap[: len(recorded)] = recorded
        if len(recorded) < count:
            at = len(recorded)
            floor[at] = max(floor[at], self.pending_floor)
        strand = Strand(self, start, self.ids.view[start : start + count].copy(), floor, cap, kept - start, samples)
        self.strands.append(strand)
        return strand

    def draft_strand(self, token: int, mask: LogitsMask | None) -> Strand:
        """A strand for the token that the last strand would draw now."""
        one = np.ones(1, dtype=np.int64)
        strand = Strand(
            self, self.strands[-1].end, one * token, one, one * self.ceiling, 0, samples=True, draft=True, mask=mask
        )
        self.strands.append(strand)
        return strand

    def output_before(self, strand: Strand) -> Sequence[int]:
        """Output tokens up to `strand`'s end, drafts included."""
        drafts = self.strands[1 : self.strands.index(strand) + 1]
        return [*self.output, *(int(draft.ids[-1]) for draft in drafts)] if drafts else self.output

    def record(self, strand: Strand) -> None:
        """A strand has finished: its tokens are settled."""
        self.lists.append(strand.token_slots())
        executed = strand.executed.tolist()
        self.depths.extend(executed[max(0, len(self.depths) - strand.start) :])
        self.pending_floor = 1

    def forget(self) -> None:
        """Back to waiting; what has been decided stays recorded."""
        if self.strands and len(self.strands[0]) == 1 and self.strands[0].start == len(self.depths):
            self.pending_floor = max(self.pending_floor, self.strands[0].depth)
        self.strands.clear()
        self.lists = SlotLists(self.sight)
        self.node, self.cached = None, 0
        self.status = Status.WAITING
