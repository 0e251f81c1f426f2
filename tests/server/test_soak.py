"""A short soak: streams of many clients are whole, and nothing is left behind. `benchmarks/soak.py` is the long one."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from tah2.bench.soak import Soak, SoakPlan, family, questions
from tah2.engine.llm import LLM
from tests.server.process import ServerProcess

PLAN = SoakPlan(clients=40, seconds=2, prompts=12, leaving=0.2, p99_seconds=5)


@pytest.mark.slow
def test_many_clients_get_every_token_once_and_leave_nothing_behind(server: ServerProcess, offline: LLM):
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    soak = Soak(address.hostname, address.port, questions(offline, PLAN.prompts), PLAN)
    report = asyncio.run(soak.run(family(server.process.pid)))
    assert soak.complaints(report) == []
    assert report["requests"] >= PLAN.clients
    assert report["left_in_the_middle"] > 0


def test_a_wrong_answer_would_be_noticed():
    soak = Soak("", 0, [], PLAN)
    good = {
        "wrong": [],
        "requests": 1,
        "held_at_the_end": {"kv_slots_used": 0.0},
        "between_tokens_seconds": {"p99": 0.1},
        "memory_mib": {"middle": 10.0, "end": 11.0},
    }
    assert soak.complaints(good) == []
    bad = {"wrong": ["x"], "requests": 0, "held_at_the_end": {"kv_slots_used": 3.0}}
    assert len(soak.complaints({**good, **bad})) == 3
    slow = {"between_tokens_seconds": {"p99": 9.0}, "memory_mib": {"middle": 10.0, "end": 100.0}}
    assert len(soak.complaints({**good, **slow})) == 2
