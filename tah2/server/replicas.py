"""Several workers behind one front, each with the whole model: the face of one `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tah2.config.strict import ConfigError
from tah2.server.async_engine import Ask, AsyncEngine, NotReady, Stream, rung
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

    async def submit(self, asks: Sequence[Ask]) -> Stream | Merged:
        """As `AsyncEngine.submit`; each prompt goes to the replica that the router chooses."""
        shares: dict[int, list[int]] = {}
        loads = self._loads()
        for place, ask in enumerate(asks):
            at = self.router.choose(loads, ask.prompt, (ask.params.max_depth, ask.params.exit_threshold))
            loads[at] = (loads[at] or 0) + ask.params.n
            shares.setdefault(at, []).append(place)
        if len(shares) == 1:
            return await self.engines[next(iter(shares))].submit(asks)
        merged = Merged()
        try:
            for at, places in shares.items():
                merged.add(await self.engines[at].submit([asks[place] for place in places]), places)
        except BaseException:
            merged.close()
            raise
        return merged

    def _loads(self) -> list[int | None]:
        """Requests in flight, by replica; None where none can be taken. Raises NotReady if nobody takes any."""
        for at, engine in enumerate(self.engines):
            if engine.restarts != self._restarts[at]:
                self._restarts[at] = engine.restarts
                self.router.forget(at)
        loads = [engine.in_flight if engine.ready else None for engine in self.engines]
        if all(load is None for load in loads):
            raise NotReady("The model is being loaded; try again shortly.")
        return loads

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


class Merged:
    """Streams of several replicas as one; places are those of the prompts in the request."""

    def __init__(self) -> None:
        self._parts: list[tuple[Stream, list[int]]] = []
        self._bell = asyncio.Event()

    def add(self, stream: Stream, places: list[int]) -> None:
        stream.bell = self._bell
        self._parts.append((stream, places))

    def __aiter__(self) -> Merged:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        while any(stream.left for stream, _ in self._parts):
            for stream, places in self._parts:
                if (news := stream.take()) is not None:
                    return places[news[0]], news[1]
            await rung(self._bell)
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort what still runs; harmless at the end."""
        for stream, _ in self._parts:
            stream.close()
