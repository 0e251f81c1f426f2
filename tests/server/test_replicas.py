"""Replicas: requests go where their beginning is known, load stays even, answers do not change, deaths are survived."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from tah2.config.strict import ConfigError
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tah2.server.async_engine import Ask, AsyncEngine, NotReady, Refusal, Stream, WorkerDied, generate
from tah2.server.config import WorkerConfig
from tah2.server.messages import Delta, Ending
from tah2.server.replicas import Merged, Replicas
from tah2.server.routing import Router, RoutingConfig

SMALL = RoutingConfig(block=4, slack=1, memory=64)
LONG = 400
"""Tokens of an answer that is still being written when a replica is killed."""


def test_equal_loads_take_turns():
    router = Router(SMALL)
    assert [router.choose([0, 0, 0], [at]) for at in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_busy_replica_runs_a_new_prompt():
    assert Router(SMALL).choose([5, 2, 3], range(20)) == 1


def test_a_known_beginning_goes_where_it_is_known():
    router = Router(SMALL)
    first = router.choose([3, 0], list(range(8)))
    assert first == 1
    assert router.choose([0, 1], [*range(8), 77, 78]) == 1
    assert router.choose([0, 1], [9, *range(8)]) == 0


def test_a_known_beginning_does_not_pile_up_on_a_busy_replica():
    router = Router(SMALL)
    router.choose([3, 0], list(range(8)))
    assert router.choose([0, 2], list(range(8))) == 0


def test_the_longest_known_beginning_decides():
    router = Router(SMALL)
    router.choose([0, 9], list(range(4)))
    router.choose([9, 0], [*range(4), 50, 51, 52, 53])
    assert router.choose([0, 0], [*range(4), 50, 51, 52, 53, 1]) == 1
    assert router.choose([1, 0], [99, 98, 97, 96]) == 1


def test_families_do_not_share_beginnings():
    router = Router(SMALL)
    assert router.choose([9, 0], range(8), (2, 0.5)) == 1
    assert router.choose([0, 1], range(8), (4, 0.5)) == 0


def test_replicas_that_cannot_take_requests_are_passed_over_and_forgotten():
    router = Router(SMALL)
    assert router.choose([9, 0], range(8)) == 1
    assert router.choose([9, None], range(8)) == 0
    assert router.choose([0, 0], range(8)) == 0
    router.forget(0)
    assert router.choose([1, 0], range(8)) == 1


def test_memory_is_bounded():
    router = Router(RoutingConfig(block=1, memory=10))
    for start in range(0, 1000, 10):
        router.choose([0, 0], range(start, start + 10))
    assert len(router._seen) == 10


@pytest.mark.parametrize("wrong", [{"block": 0}, {"memory": 0}, {"slack": -1}])
def test_routing_refuses_what_makes_no_sense(wrong: dict[str, int]):
    with pytest.raises(ConfigError):
        RoutingConfig(**wrong)


def test_a_server_needs_a_replica():
    with pytest.raises(ConfigError, match="at least one replica"):
        Replicas(WorkerConfig("nowhere"), 0)


def config(checkpoint: Path) -> WorkerConfig:
    return WorkerConfig(str(checkpoint), {"kv_slots": 4000, "kernels": "off"}, device="cpu", threads=1)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def replicas(checkpoint: Path, loop: asyncio.Runner) -> Iterator[Replicas]:
    made = Replicas(config(checkpoint), 2, routing=SMALL)

    async def start() -> None:
        await made.start()

    loop.run(start())
    yield made
    loop.run(made.stop())


async def answer(replicas: Replicas, prompt: list[int], params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    async with aclosing(generate(replicas, prompt, params)) as news:  # type: ignore[type-var]
        async for delta in news:
            assert isinstance(delta, Delta)
            tokens += delta.tokens
    return tokens


def test_two_replicas_answer_as_one_engine_does(replicas: Replicas, loop: asyncio.Runner, offline: LLM):
    prompts = [list(range(at, at + 12)) for at in range(0, 80, 10)]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=24)
    before = [engine.counters.output_tokens for engine in replicas.engines]

    async def ask() -> list[list[int]]:
        return await asyncio.gather(*(answer(replicas, prompt, params) for prompt in prompts))

    told = loop.run(ask())
    expected = offline.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert told == [output.outputs[0].token_ids for output in expected]
    wrote = [engine.counters.output_tokens - b for engine, b in zip(replicas.engines, before, strict=True)]
    assert min(wrote) > 0
    assert sum(wrote) == sum(map(len, told))
    assert replicas.in_flight == 0
    assert [engine.in_flight for engine in replicas.engines] == [0, 0]


def test_prompts_of_one_request_are_spread_and_keep_their_places(replicas: Replicas, loop: asyncio.Runner):
    prompts = [[at, at + 1, at + 2] for at in range(6)]
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=9, n=2)

    async def together() -> dict[tuple[int, int], list[int]]:
        stream = await replicas.submit([Ask(prompt, params) for prompt in prompts])
        assert isinstance(stream, Merged)
        told: dict[tuple[int, int], list[int]] = {}
        async for place, delta in stream:
            told.setdefault((place, delta.index), []).extend(delta.tokens)
        stream.close()
        return told

    async def alone(place: int) -> dict[tuple[int, int], list[int]]:
        told: dict[tuple[int, int], list[int]] = {}
        async for delta in generate(replicas, prompts[place], params):
            told.setdefault((place, delta.index), []).extend(delta.tokens)
        return told

    told = loop.run(together())
    assert told == {key: tokens for place in range(6) for key, tokens in loop.run(alone(place)).items()}
    assert replicas.in_flight == 0


def test_a_replica_that_dies_after_its_share_is_done_does_no_harm():
    ending = Ending("stop", None, None, 0, 0, 0.0, 0, 0)

    async def scene() -> list[tuple[int, str]]:
        merged, parts = Merged(), [Stream(AsyncEngine(WorkerConfig("nowhere")), None, 1) for _ in range(2)]  # type: ignore[arg-type]
        for name, part in zip("ab", parts, strict=True):
            part.places[name] = 0
        merged.add(parts[0], [1])
        merged.add(parts[1], [0])
        parts[0].put(Delta("a", 0, "first", [1], [1], ending=ending))
        told = [await anext(merged)]
        parts[0].put(WorkerDied("It ended."))
        asyncio.get_running_loop().call_later(0.01, parts[1].put, Delta("b", 0, "second", [1], [1], ending=ending))
        async with asyncio.timeout(10):
            told += [news async for news in merged]
        return [(place, delta.text) for place, delta in told]

    assert asyncio.run(scene()) == [(1, "first"), (0, "second")]


def test_leaving_a_spread_request_ends_all_of_it(replicas: Replicas, loop: asyncio.Runner):
    params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)

    async def leave() -> None:
        stream = await replicas.submit([Ask([at], params) for at in range(4)])
        await anext(stream)
        stream.close()
        assert replicas.in_flight == 0
        async with asyncio.timeout(120):
            while replicas.counters.running:
                await asyncio.sleep(0.01)

    loop.run(leave())


def test_one_refused_prompt_refuses_the_whole_request(replicas: Replicas, loop: asyncio.Runner):
    asks = [Ask([1, 2], SamplingParams(max_tokens=900)), Ask([10_000], SamplingParams()), Ask([3], SamplingParams())]

    async def ask() -> None:
        await replicas.submit(asks)

    with pytest.raises(Refusal, match="token ids"):
        loop.run(ask())
    assert replicas.in_flight == 0


def test_a_conversation_stays_where_its_cache_is(replicas: Replicas, loop: asyncio.Runner):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt, cached = list(range(40)), replicas.counters.cached_tokens

    async def converse() -> None:
        history = prompt
        for turn in range(4):
            history = [*history, *await answer(replicas, history, params), 100 + turn]

    loop.run(converse())
    assert replicas.counters.cached_tokens - cached >= 3 * len(prompt)


def test_a_dead_replica_fails_its_requests_and_the_other_goes_on(replicas: Replicas, loop: asyncio.Runner):
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)

    async def scene() -> tuple[list[int | BaseException], list[int]]:
        tasks = [asyncio.create_task(answer(replicas, [at, at, at], params)) for at in (1, 2)]
        while min(engine.counters.running for engine in replicas.engines) < 1:
            await asyncio.sleep(0.01)
        pid = replicas.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        during = await answer(replicas, [7, 7], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        async with asyncio.timeout(300):
            while not all(engine.ready for engine in replicas.engines):
                await asyncio.sleep(0.05)
        return [end if isinstance(end, BaseException) else len(end) for end in ends], during

    ends, during = loop.run(scene())
    assert sorted(type(end).__name__ for end in ends) == ["WorkerDied", "int"]
    assert next(str(end) for end in ends if isinstance(end, WorkerDied)).endswith("try again.")
    assert LONG in ends
    assert len(during) == 5
    assert replicas.restarts == 1


def test_nothing_is_taken_while_no_replica_runs(checkpoint: Path, loop: asyncio.Runner):
    idle = Replicas(config(checkpoint), 2)
    assert not idle.ready
    assert idle.facts is None
    with pytest.raises(NotReady):
        loop.run(answer(idle, [1], SamplingParams()))


def test_if_one_replica_cannot_start_none_is_left_behind(loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch):
    broken = Replicas(WorkerConfig("nowhere"), 2)
    stopped = []

    async def fail() -> None:
        raise ConfigError("There is no such model.")

    async def start() -> None:
        await asyncio.sleep(0.01)

    async def stop(at: int) -> None:
        stopped.append(at)

    for at, begins in enumerate((start, fail)):
        monkeypatch.setattr(broken.engines[at], "start", begins)
        monkeypatch.setattr(broken.engines[at], "stop", lambda at=at: stop(at))
    with pytest.raises(ConfigError, match="no such model"):
        loop.run(broken.start())
    assert stopped == [0, 1]
