"""Samples over several engines: processes of this machine, or workers of a Ray cluster.

The driver alone writes. It hands each worker as many samples as its engine runs at once, and a new one for every
record that comes back, so that fast workers do more and little is lost when one dies.
"""

from __future__ import annotations

import dataclasses
import queue
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tah2.config.strict import ConfigError
from tah2.evals.records import SampleRecord
from tah2.evals.run_plan import EvalConfig, Sample

LOOK_AGAIN_SECONDS = 2.0
"""How often the driver looks whether its workers live, and an idle worker for samples."""


class Ready(NamedTuple):
    """A worker's first word: it wants so many samples at once."""

    window: int


class Broken(NamedTuple):
    """A worker's last word."""

    reason: str


def work(config: EvalConfig, number: int, inbox: Any, outbox: Any, seconds: float = LOOK_AGAIN_SECONDS) -> None:
    """Run one engine on the samples of `inbox` until a None comes; (number, record) goes to `outbox`."""
    try:
        from tah2.evals.run import engine_run

        run = engine_run(own_share(config, number))
        outbox.put((number, Ready(run.window)))
        open_ = True
        while open_ or run.busy:
            for sample in _arrivals(inbox, wait=seconds if not run.busy else 0):
                if sample is None:
                    open_ = False
                    continue
                for record in run.start(sample):
                    outbox.put((number, record))
            if run.busy:
                for record in run.step():
                    outbox.put((number, record))
    except (Exception, KeyboardInterrupt) as error:
        reason = str(error) if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
        outbox.put((number, Broken(reason)))


def own_share(config: EvalConfig, number: int) -> EvalConfig:
    """The configuration of one worker: a GPU of its own where there are several, and its part of the CPU's threads."""
    import torch

    if config.engine.get("device") in (None, "cuda") and torch.cuda.device_count() > 1:
        device = f"cuda:{number % torch.cuda.device_count()}"
        return dataclasses.replace(config, engine={**config.engine, "device": device})
    if not config.ray:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.workers))
    return config


def _arrivals(inbox: Any, wait: float) -> Iterator[Sample | None]:
    """What lies in the inbox now; with `wait`, the first of it may take that long."""
    try:
        yield inbox.get(timeout=wait) if wait else inbox.get_nowait()
        while True:
            yield inbox.get_nowait()
    except queue.Empty:  # Ray's own exception is one too
        return


class WorkersRun:
    def __init__(self, config: EvalConfig) -> None:
        self.config = config

    def records(self, samples: Iterable[Sample]) -> Iterator[SampleRecord]:
        """One record per sample as they come; leaving early stops the workers."""
        pool = _ray_pool(self.config) if self.config.ray else _process_pool(self.config)
        try:
            yield from _drive(pool, iter(samples))
        finally:
            pool.stop()


@dataclasses.dataclass(frozen=True)
class Pool:
    inboxes: list[Any]
    outbox: Any
    alive: Callable[[int], bool]
    stop: Callable[[], None]


def _drive(pool: Pool, waiting: Iterator[Sample]) -> Iterator[SampleRecord]:
    held = [0] * len(pool.inboxes)
    told = [False] * len(pool.inboxes)

    def hand(number: int, most: int) -> None:
        for _ in range(most):
            if (sample := next(waiting, None)) is None:
                if not told[number]:
                    pool.inboxes[number].put(None)
                    told[number] = True
                return
            held[number] += 1
            pool.inboxes[number].put(sample)

    while not all(told) or any(held):
        try:
            number, news = pool.outbox.get(timeout=LOOK_AGAIN_SECONDS)
        except queue.Empty:
            for number in range(len(held)):
                if (held[number] or not told[number]) and not pool.alive(number):
                    raise ConfigError(f"Worker {number} has died; the same command goes on from here.") from None
            continue
        if isinstance(news, Broken):
            raise ConfigError(f"Worker {number} failed: {news.reason}")
        if isinstance(news, Ready):
            hand(number, news.window)
            continue
        held[number] -= 1
        yield news
        hand(number, 1)


def _process_pool(config: EvalConfig) -> Pool:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    outbox: Any = context.Queue()
    inboxes: list[Any] = [context.Queue() for _ in range(config.workers)]
    processes = [
        context.Process(target=work, args=(config, number, inbox, outbox), daemon=True)
        for number, inbox in enumerate(inboxes)
    ]
    for process in processes:
        process.start()

    def stop() -> None:
        for process in processes:
            process.join(timeout=0.1)
            process.terminate()
            process.join()

    return Pool(inboxes, outbox, lambda number: processes[number].is_alive(), stop)


def _ray_pool(config: EvalConfig) -> Pool:
    try:
        import ray
        from ray.util.queue import Queue
    except ImportError:
        raise ConfigError("Workers on a cluster need the library 'ray': install tah2 with its extra 'ray'.") from None
    import torch

    ray.init(ignore_reinit_error=True, log_to_driver=False)
    outbox: Any = Queue()
    inboxes: list[Any] = [Queue() for _ in range(config.workers)]
    remote = ray.remote(num_gpus=1 if torch.cuda.is_available() else 0, max_retries=0)(work)
    tasks = [remote.remote(config, number, inbox, outbox) for number, inbox in enumerate(inboxes)]

    def alive(number: int) -> bool:
        done, _ = ray.wait([tasks[number]], timeout=0)
        return not done

    def stop() -> None:
        for task in tasks:
            ray.cancel(task, force=True)
        for box in [*inboxes, outbox]:
            box.shutdown(force=True)

    return Pool(inboxes, outbox, alive, stop)
