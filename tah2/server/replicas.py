"""Several workers behind one front, each with the whole model: the face of one `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from tah2.config.strict import ConfigError
from tah2.engine.params import SamplingParams
from tah2.server.async_engine import AsyncEngine, NotReady
from tah2.server.config import WorkerConfig
from tah2.server.messages import Counters, Delta, ModelFacts
from tah2.server.routing import Router, RoutingConfig


class Replicas:
    """Sends every request to one of `count` engines; a dead one is passed over until it is back."""

    def __init__(
        self,
        config: WorkerConfig,
        count: int,
        on_counters: Callable[[Counters, Counters], None] | None = None,
        routing: RoutingConfig | None = None,
    ) -> None:
        if count < 1:
            raise ConfigError(f"A server needs at least one replica, not {count}.")
        self.config = config
        self.engines = [AsyncEngine(config, on_counters) for _ in range(count)]
        self.router = Router(routing)
        self._restarts = [0] * count
        self._loads = [0] * count

    async def start(self) -> ModelFacts:
        """Load all replicas at once; if one cannot start, none is left behind."""
        tasks = [asyncio.create_task(engine.start()) for engine in self.engines]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.stop()
            raise
        assert self.facts is not None
        return self.facts

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continue_probs: bool = False
    ) -> AsyncIterator[Delta]:
        """As `AsyncEngine.generate`, on the replica that the router chooses."""
        at = self._choose(prompt, params)
        self._loads[at] += params.n
        try:
            async with aclosing(
                self.engines[at].generate(prompt, params, continue_probs=continue_probs)  # type: ignore[type-var]
            ) as news:
                async for delta in news:
                    yield delta
        finally:
            self._loads[at] -= params.n

    def _choose(self, prompt: Sequence[int], params: SamplingParams) -> int:
        for at, engine in enumerate(self.engines):
            if engine.restarts != self._restarts[at]:
                self._restarts[at] = engine.restarts
                self.router.forget(at)
        loads = [load if engine.ready else None for engine, load in zip(self.engines, self._loads, strict=True)]
        if all(load is None for load in loads):
            raise NotReady("The model is being loaded; try again shortly.")
        return self.router.choose(loads, prompt, (params.max_depth, params.exit_threshold))

    @property
    def facts(self) -> ModelFacts | None:
        """Of one model, with the room of all replicas."""
        one = next((engine.facts for engine in self.engines if engine.facts is not None), None)
        if one is None:
            return None
        count = len(self.engines)
        return msgspec.structs.replace(one, max_num_seqs=count * one.max_num_seqs, kv_slots=count * one.kv_slots)

    @property
    def ready(self) -> bool:
        """Whether any replica takes requests."""
        return any(engine.ready for engine in self.engines)

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self.engines)

    @property
    def restarts(self) -> int:
        return sum(engine.restarts for engine in self.engines)

    @property
    def pids(self) -> list[int | None]:
        return [engine.pid for engine in self.engines]

    @property
    def counters(self) -> Counters:
        """The sums over all replicas."""
        each: list[dict[str, Any]] = [msgspec.structs.asdict(engine.counters) for engine in self.engines]
        return Counters(**{name: sum(row[name] for row in each) for name in each[0]})
