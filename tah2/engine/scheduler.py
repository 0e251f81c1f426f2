"""Who runs in the next pass, and who must make room.

Order of arrival decides everything: admission, budget, and preemption (the youngest goes first). The oldest running
request is never preempted and always fits, because a request whose worst case exceeds the pool is refused when it
arrives; so every request finishes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field

from tah2.engine.config import EngineConfig
from tah2.engine.pool import PoolError, Pools
from tah2.engine.prefix import PrefixCache, common_prefix
from tah2.engine.request import Request, Status
from tah2.engine.slots import TokenSlots
from tah2.engine.strand import Strand
from tah2.engine.wavefront import draft


@dataclass(frozen=True)
class Pass:
    strands: list[Strand]
    drafting: bool
    """There may be room for drafts in the next pass, so draws of unfinished tokens are wanted."""


@dataclass
class DepthEstimate:
    """Mean depth of settled tokens per (ceiling, threshold); begins at the ceiling and learns quickly."""

    sums: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def record(self, request: Request, executed: list[int]) -> None:
        total, count = self._of(request)
        self.sums[request.ceiling, request.threshold] = (total + sum(executed), count + len(executed))

    def mean(self, request: Request) -> float:
        total, count = self._of(request)
        return total / count

    def _of(self, request: Request) -> tuple[float, float]:
        return self.sums.get((request.ceiling, request.threshold), (8.0 * request.ceiling, 8.0))


class Scheduler:
    def __init__(self, config: EngineConfig, pools: Pools, prefix: PrefixCache | None) -> None:
        self.config, self.pools, self.prefix = config, pools, prefix
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """Both in order of arrival."""
        self.estimate = DepthEstimate()

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda other: other.order)

    def next_pass(self) -> Pass:
        """Admit, choose, make room and assign slots."""
        self._admit()
        while True:
            chosen = self._choose()
            looped = sum(strand.rows for strand in chosen.strands)
            once = sum(len(strand) for strand in chosen.strands if strand.depth == 1) if self.pools.once else 0
            if self._make_room(looped, once):
                break
            self._retreat(chosen.strands)
        for strand in chosen.strands:
            assign(strand, self.pools)
        return chosen

    def _admit(self) -> None:
        held = 0
        while held < len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[held]
            if self._worth_waiting(request):
                held += 1
                continue
            if not self._fits(request):
                return
            del self.waiting[held]
            self._start(request)

    def _start(self, request: Request) -> None:
        request.status = Status.RUNNING
        insort(self.running, request, key=lambda other: other.order)
        if self.prefix is None or request.cache_key is None:
            return
        match = self.prefix.match(request.cache_key, request.ids.view[: request.shareable])
        self.prefix.lock(match.node)
        request.node, request.cached = match.node, len(match)
        request.lists.append(match.tokens)
        request.depths[: len(match)] = match.tokens.depths.tolist()
        if not request.output:
            request.metrics.num_cached_tokens = len(match)

    def _worth_waiting(self, request: Request) -> bool:
        """Is a running request computing a prefix that this one could share at least half of its work with?"""
        if self.prefix is None or request.cache_key is None or request.shareable == 0:
            return False
        mine = request.ids.view[: request.shareable]
        matched = self.prefix.matched(request.cache_key, mine)
        for other in self.running:
            if other.cache_key == request.cache_key and len(other.lists) < len(other.prompt):
                shared = common_prefix(other.prompt, mine)
                if shared > matched and 2 * (shared - matched) >= len(mine) - matched and shared > len(other.lists):
                    return True
        return False

    def _fits(self, request: Request) -> bool:
        """Is there room for this request and the near future of all that run, at the depths shown so far?"""
        if not self.running:
            return True
        free = self.pools.looped.slots.free + (self.prefix.idle_looped if self.prefix is not None else 0)
        return sum(self._expected(other) for other in [*self.running, request]) <= free

    def _expected(self, request: Request) -> float:
        produced = len(request.output)
        tokens = request.remaining + min(request.max_tokens - produced, self.config.admission_horizon)
        if request.status is Status.WAITING and self.prefix is not None and request.cache_key is not None:
            tokens -= self.prefix.matched(request.cache_key, request.ids.view[: request.shareable])
        return tokens * self.estimate.mean(request)

    def _choose(self) -> Pass:
        """Decode strands, then chunks under way, then new chunks, then drafts where they ride for free."""
        budget = self.config.max_batch_tokens
        chosen: list[Strand] = []
        for request in self.running:
            if not request.strands and request.remaining == 1:
                request.next_strand(1)
            if request.strands and request.strands[0].rows == 1:
                chosen.append(request.strands[0])
        budget -= len(chosen)
        chunks = 0
        for request in self.running:
            strand = request.strands[0] if request.strands else None
            if strand is not None and strand.rows > 1 and (strand.rows <= budget or not chunks):
                chosen.append(strand)
                chunks += 1
                budget -= strand.rows
        for request in self.running:
            if not request.strands and (budget > 0 or not chosen):
                strand = request.next_strand(max(budget, 1))
                chosen.append(strand)
                budget -= strand.rows
        room = self.config.wavefront_rows - sum(strand.rows for strand in chosen)
        drafting = room > 0 and any(request.drafts for request in self.running)
        if drafting:
            drafts = [strand for request in self.running for strand in request.strands[1:] if not strand.finished]
            chosen += sorted(drafts, key=lambda strand: strand.start - strand.request.strands[0].start)[:room]
        return Pass(chosen, drafting)

    def _make_room(self, looped: int, once: int) -> bool:
        if not self.pools.room(looped, once) and self.prefix is not None:
            self.prefix.evict(looped, once)
        return self.pools.room(looped, once)

    def _retreat(self, strands: list[Strand]) -> None:
        """Give slots back: all drafts first, then the youngest request."""
        drafting = [request for request in self.running if len(request.strands) > 1]
        for request in drafting:
            self.discard(request, 1)
        if drafting:
            return
        if len(self.running) < 2:
            raise PoolError("The only running request does not fit the pool.")
        self.preempt(self.running[-1])

    def preempt(self, request: Request) -> None:
        """Take a running request's slots; it waits again and will replay what it has decided."""
        self._let_go(request)
        request.forget()
        request.metrics.num_preemptions += 1
        self.running.remove(request)
        self.add(request)

    def finish(self, request: Request, keep: bool) -> None:
        """A request leaves for good; `keep`: its settled tokens may serve others."""
        request.status = Status.FINISHED
        if request in self.waiting:
            self.waiting.remove(request)
            return
        if request not in self.running:
            return
        self.running.remove(request)
        self.discard(request, 0)
        if keep:
            self.publish(request, len(request.prompt) if request.runs_all else len(request.lists))
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        self.discard(request, 0)
        own = request.lists.tokens(request.cached)
        self.pools.give(own.looped.tolist(), own.once.tolist())
        if request.node is not None and self.prefix is not None:
            self.prefix.unlock(request.node)
            request.node = None
        request.lists = type(request.lists)(request.sight)
        request.cached = 0

    def discard(self, request: Request, start: int) -> None:
        """Drop strands from number `start` on, with their slots."""
        for strand in request.strands[start:]:
            self.pools.give(*strand.held())
            request.metrics.wasted_entries += int(strand.executed.sum()) if strand.draft else 0
        del request.strands[start:]

    def publish(self, request: Request, end: int) -> None:
        """Hand the settled tokens `[cached, end)` to the prefix cache; what it had already replaces the request's."""
        end = min(end, len(request.lists))
        start = request.cached
        if self.prefix is None or request.node is None or end <= start:
            return
        own = request.lists.tokens(start, end)
        match = self.prefix.insert(request.node, request.ids.view[start:end], own)
        if len(match):
            self._adopt(request, start, match.tokens, own.part(0, len(match)))
        self.prefix.lock(match.node)
        self.prefix.unlock(request.node)
        request.node, request.cached = match.node, end

    def _adopt(self, request: Request, start: int, theirs: TokenSlots, ours: TokenSlots) -> None:
        request.lists = request.lists.replace(start, theirs)
        request.depths[start : start + len(theirs)] = theirs.depths.tolist()
        self.pools.give(ours.looped.tolist(), ours.once.tolist())

    def add_drafts(self) -> None:
        for request in self.running:
            draft(request)


def assign(strand: Strand, pools: Pools) -> None:
    """Slots for the strand's next pass; rows that have theirs (after a failed pass) keep them."""
    missing = strand.active[strand.slots[strand.active, strand.depth - 1] < 0]
    strand.slots[missing, strand.depth - 1] = pools.looped.slots.take(len(missing))
    if pools.once is not None and strand.depth == 1 and strand.once[0] < 0:
        strand.once[:] = pools.once.slots.take(len(strand))
