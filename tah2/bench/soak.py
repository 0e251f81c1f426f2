"""Many streaming clients for a while: is every token there once, is all memory given back, is nobody kept waiting?

Clients ask for greedy answers whose tokens are known from the engine alone. Some leave in the middle. In the end the
server must hold nothing for anybody, and its processes must not have grown.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams

EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)
END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class SoakPlan:
    clients: int = 200
    seconds: float = 60.0
    prompts: int = 48
    leaving: float = 0.1
    """Share of the requests whose client leaves in the middle."""
    p99_seconds: float = 1.0
    """Bound on the time between two tokens."""
    growth_mib: float = 48.0
    """Bound on the growth of all processes from the middle to the end."""


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that the engine alone gives."""

    prompt: list[int]
    answer: list[int]

    @property
    def body(self) -> bytes:
        fields = {"prompt": self.prompt, "max_tokens": len(self.answer), "temperature": 0, "stream": True}
        return json.dumps({**fields, "ignore_eos": True, "return_token_ids": True}).encode()


@dataclass
class Seen:
    """What all clients have seen."""

    requests: int = 0
    left: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def questions(llm: LLM, count: int, seed: int = 0) -> list[Question]:
    """Prompts of different lengths, many with a common beginning."""
    draws, vocabulary = random.Random(seed), min(llm.engine.decoder.backbone.vocab_size, 256)
    common = [draws.randrange(vocabulary) for _ in range(40)]
    prompts = []
    for number in range(count):
        own = [draws.randrange(vocabulary) for _ in range(draws.randrange(1, 30))]
        prompts.append(common[: draws.randrange(41)] + own if number % 2 else own)
    params = [SamplingParams(temperature=0.0, max_tokens=draws.randrange(4, 80), ignore_eos=True) for _ in prompts]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [Question(p, list(out.outputs[0].token_ids)) for p, out in zip(prompts, outputs, strict=True)]


class Soak:
    def __init__(self, host: str, port: int, asked: Sequence[Question], plan: SoakPlan) -> None:
        self.host, self.port, self.asked, self.plan, self.seen = host, port, asked, plan, Seen()

    async def run(self, pids: Sequence[int]) -> dict[str, Any]:
        """All clients until the time is over, then what is left of them in the server."""
        started = time.monotonic()
        clients = [asyncio.create_task(self._client(number, started)) for number in range(self.plan.clients)]
        await asyncio.sleep(self.plan.seconds / 2)
        middle = memory_mib(pids)
        await asyncio.gather(*clients)
        seconds, seen = time.monotonic() - started, self.seen
        held = await self._drained()
        return {
            "clients": self.plan.clients,
            "seconds": round(seconds, 1),
            "requests": seen.requests,
            "left_in_the_middle": seen.left,
            "tokens": seen.tokens,
            "tokens_per_second": round(seen.tokens / seconds, 1),
            "wrong": seen.wrong[:5],
            "first_token_seconds": spread(seen.first),
            "between_tokens_seconds": spread(seen.between),
            "held_at_the_end": held,
            "memory_mib": {"middle": middle, "end": memory_mib(pids)},
        }

    def complaints(self, report: dict[str, Any]) -> list[str]:
        """What did not hold."""
        memory, plan = report["memory_mib"], self.plan
        checks = {
            f"answers differ from the engine's: {report['wrong']}": bool(report["wrong"]),
            "no request was answered": report["requests"] == 0,
            f"the server still holds {report['held_at_the_end']}": any(report["held_at_the_end"].values()),
            f"time between tokens, p99, is above {plan.p99_seconds} s": report["between_tokens_seconds"]["p99"]
            > plan.p99_seconds,
            f"memory grew by more than {plan.growth_mib} MiB": memory["end"] - memory["middle"] > plan.growth_mib,
        }
        return [text for text, holds in checks.items() if holds]

    async def _client(self, number: int, started: float) -> None:
        draws = random.Random(number)
        while time.monotonic() - started < self.plan.seconds:
            question = draws.choice(self.asked)
            leave = draws.random() < self.plan.leaving and len(question.answer) > 8
            try:
                await self._ask(question, leave)
            except (OSError, ValueError) as error:
                self.seen.wrong.append(f"{type(error).__name__}: {error}")

    async def _ask(self, question: Question, leave: bool) -> None:
        body = question.body
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        last = time.monotonic()
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        try:
            while data := await reader.read(1 << 16):
                now, fresh = time.monotonic(), data.count(b'"token_ids"')
                if fresh:
                    (self.seen.between if b'"token_ids"' in answer else self.seen.first).append(now - last)
                    self.seen.between.extend([0.0] * (fresh - 1))
                    last = now
                answer += data
                if leave and answer.count(b'"token_ids"') > 3:
                    self.seen.left += 1
                    return
        finally:
            writer.close()
        self._judge(question, answer)

    def _judge(self, question: Question, answer: bytes) -> None:
        choices = [json.loads(event)["choices"][0] for event in EVENT.findall(answer) if b'"choices"' in event]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        self.seen.requests += 1
        self.seen.tokens += len(tokens)
        if tokens != question.answer or END not in answer or choices[-1]["finish_reason"] != "length":
            self.seen.wrong.append(f"{len(tokens)} tokens of {len(question.answer)}: {answer[-200:]!r}")

    async def _drained(self, patience: float = 20.0) -> dict[str, float]:
        """What the server says it holds, once that is nothing or it has had time enough."""
        end = time.monotonic() + patience
        while True:
            held = await self._held()
            if not any(held.values()) or time.monotonic() > end:
                return held
            await asyncio.sleep(0.1)

    async def _held(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = (await reader.read(-1)).decode()
        writer.close()
        names = ("num_requests_running", "num_requests_waiting", "kv_slots_used")
        rows = {name: re.search(rf"^\w+:{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names}
        return {name: float("nan") if row is None else float(row.group(1)) for name, row in rows.items()}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    at = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for name, share in at.items()}


def memory_mib(pids: Sequence[int]) -> float:
    """Resident memory of the processes, where the system tells."""
    pages = 0
    for pid in pids:
        path = Path(f"/proc/{pid}/statm")
        pages += int(path.read_text().split()[1]) if path.is_file() else 0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def family(pid: int) -> list[int]:
    """A process and its children, where the system tells."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [pid, *(map(int, path.read_text().split()) if path.is_file() else ())]
