"""The front's view of the engine: requests go out, their news come in; the worker behind it may die and come back.

    engine = AsyncEngine(WorkerConfig("path/to/looped"))
    await engine.start()
    async with aclosing(generate(engine, prompt_ids, SamplingParams(max_tokens=8))) as news:
        async for delta in news:
            print(delta.text, delta.depths)
    await engine.stop()

`submit` does the same for several prompts that belong together. Everything runs on one event loop; leaving `generate`
early, also by cancellation, aborts the request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tah2.config.strict import ConfigError
from tah2.engine.params import SamplingParams
from tah2.server.config import WorkerConfig
from tah2.server.messages import (
    Abort,
    Accepted,
    Add,
    Counters,
    Delta,
    ModelFacts,
    News,
    Refused,
)
from tah2.server.process import Worker, WorkerDied

log = logging.getLogger("tah2.server")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds between a worker's death and the next start; doubled for every start that fails."""


class NotReady(Exception):
    """No worker is running at the moment."""


class Refusal(ValueError):
    """The engine does not take the request; the message is one sentence for the user."""


@dataclass(frozen=True)
class Ask:
    """One prompt and what is wanted of it."""

    prompt: Sequence[int]
    params: SamplingParams
    continue_probs: bool = False


class Source(Protocol):
    """A running submission: pairs of a request's place and what a step added."""

    def __aiter__(self) -> Source: ...
    async def __anext__(self) -> tuple[int, Delta]: ...
    def close(self) -> None: ...


class Front(Protocol):
    """What a server needs of an engine, be it one worker or several replicas."""

    config: WorkerConfig

    async def start(self) -> ModelFacts: ...
    async def stop(self) -> None: ...
    async def submit(self, asks: Sequence[Ask]) -> Source: ...
    @property
    def ready(self) -> bool: ...
    @property
    def facts(self) -> ModelFacts | None: ...
    @property
    def counters(self) -> Counters: ...


async def generate(
    front: Front, prompt: Sequence[int], params: SamplingParams, *, continue_probs: bool = False
) -> AsyncIterator[Delta]:
    """One prompt: yield what every step adds to every sample, until all samples have ended."""
    stream = await front.submit([Ask(prompt, params, continue_probs)])
    try:
        async for _, delta in stream:
            yield delta
    finally:
        stream.close()


class AsyncEngine:
    """One worker and its life."""

    def __init__(self, config: WorkerConfig, on_counters: Callable[[Counters, Counters], None] | None = None) -> None:
        self.config = config
        self._facts: ModelFacts | None = None
        self._counters = Counters()
        self.restarts = 0
        self.pid: int | None = None
        self._on_counters = on_counters or (lambda old, new: None)
        self._worker: Worker | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._streams: dict[str, Stream] = {}
        self._names = itertools.count()
        self._stopping = False

    @property
    def facts(self) -> ModelFacts | None:
        """Known once a worker has started."""
        return self._facts

    @property
    def counters(self) -> Counters:
        """The worker's newest."""
        return self._counters

    @property
    def ready(self) -> bool:
        return self._worker is not None and not self._stopping

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    async def start(self) -> ModelFacts:
        """Load the model; returns once requests can come, or raises ConfigError with what is wrong."""
        facts = await self._launch()
        self._keeper = asyncio.create_task(self._keep())
        return facts

    async def stop(self) -> None:
        """End the worker; what still runs fails."""
        self._stopping = True
        worker, self._worker = self._worker, None
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        if worker is not None:
            await worker.stop()
        self._fail_all("The server is shutting down.")

    async def submit(self, asks: Sequence[Ask]) -> Stream:
        """Hand over requests that belong together; returns once the engine has taken all of them.

        Raises Refusal (one of them can never run), NotReady, or WorkerDied. Close the stream.
        """
        if self._worker is None:
            raise NotReady("The model is being loaded; try again shortly.")
        stream = Stream(self, self._worker, sum(ask.params.n for ask in asks))
        try:
            for place, ask in enumerate(asks):
                name = f"r{next(self._names)}"
                stream.places[name] = place
                self._streams[name] = stream
                self._worker.send(Add(name, list(ask.prompt), ask.params, ask.continue_probs))
            await stream.accepted(len(asks))
        except BaseException:
            stream.close()
            raise
        return stream

    def forget(self, stream: Stream) -> None:
        """Nobody listens to `stream` any more: what still runs is aborted."""
        for name in stream.places:
            if self._streams.pop(name, None) is not None and stream.left and stream.worker is self._worker:
                stream.worker.send(Abort(name))

    async def _launch(self) -> ModelFacts:
        worker = Worker(self.config, self._hear)
        ready = await worker.start()
        self._facts, self.pid, self._counters = ready.facts, ready.pid, Counters()
        self._worker = worker
        log.info("worker started", extra={"fields": {"pid": ready.pid, "model": self.config.model}})
        return ready.facts

    async def _keep(self) -> None:
        """Whenever the worker dies: fail its requests, start another one."""
        while True:
            worker = self._worker
            assert worker is not None
            await worker.gone.wait()
            self._worker = None
            self._on_counters(self._counters, Counters())
            self._counters = Counters()
            self._fail_all(
                "The worker that ran this request ended unexpectedly; the server is starting a new one, try again."
            )
            code = await worker.reap()
            log.error("worker ended", extra={"fields": {"pid": self.pid, "exit_code": code}})
            pause = FIRST_PAUSE
            while self._worker is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                self.restarts += 1
                try:
                    await self._launch()
                except (ConfigError, WorkerDied, OSError) as error:
                    log.error("worker cannot start", extra={"fields": {"error": str(error)}})

    def _hear(self, report: News | Accepted | Refused) -> None:
        if isinstance(report, News):
            self._on_counters(self._counters, report.counters)
            self._counters = report.counters
            for delta in report.deltas:
                if (stream := self._streams.get(delta.id)) is not None:
                    stream.put(delta)
        elif (stream := self._streams.get(report.id)) is not None:
            stream.put(report if isinstance(report, Accepted) else Refusal(report.message))

    def _fail_all(self, message: str) -> None:
        for stream in set(self._streams.values()):
            stream.put(WorkerDied(message))


class Stream:
    """News of requests that were submitted together: pairs of a request's place among them and what a step added."""

    def __init__(self, engine: AsyncEngine, worker: Worker, samples: int) -> None:
        self.engine, self.worker = engine, worker
        self.places: dict[str, int] = {}
        self.left = samples
        """Samples that have not ended."""
        self.bell = asyncio.Event()
        """Rings when there is news; several streams may share one."""
        self._inbox: deque[Delta | Accepted | Exception] = deque()

    def put(self, news: Delta | Accepted | Exception) -> None:
        self._inbox.append(news)
        self.bell.set()

    async def accepted(self, count: int) -> None:
        """Wait until the engine has taken all `count` requests."""
        early: list[Delta | Accepted | Exception] = []
        while count:
            while not self._inbox:
                await rung(self.bell)
            news = self._inbox.popleft()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, Accepted):
                count -= 1
            else:
                early.append(news)
        self._inbox.extendleft(reversed(early))

    def take(self) -> tuple[int, Delta] | None:
        """The next news, if there is any now; what happens to the worker after the last one is nobody's concern."""
        if not self.left or not self._inbox:
            return None
        news = self._inbox.popleft()
        if isinstance(news, Exception):
            self.left = 0
            raise news
        assert isinstance(news, Delta)
        self.left -= news.ending is not None
        return self.places[news.id], news

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        while self.left:
            if (news := self.take()) is not None:
                return news
            await rung(self.bell)
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort what still runs; harmless at the end."""
        self.engine.forget(self)


async def rung(bell: asyncio.Event) -> None:
    """Wait for the next ring; what rang before has been looked at."""
    bell.clear()
    await bell.wait()
