"""Latency and tokens per second, the variants taking turns problem by problem so that the machine's moods hit all."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tah2.engine.llm import LLM
from tah2.evals.records import sample_seed
from tah2.study.layout import RUNTIME
from tah2.study.ledger import digest_files
from tah2.study.plan import Task, Unit, timed_units
from tah2.study.stages.respond import make_llm, params_of, world_of
from tah2.study.world import Problem
from tah2.train.summary import write_summary

if TYPE_CHECKING:
    from tah2.study.config import GenerateSection
    from tah2.study.shop import Shop, Tell


@dataclass
class Clock:
    """One variant at one batch size."""

    unit: Unit
    llm: LLM
    batch: int
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    decoded: int = 0
    flops: int = 0

    def answer(self, problem: Problem, section: GenerateSection) -> None:
        """`batch` samples of one problem at once, as in the paper."""
        seeds = [sample_seed(section.seed, problem.family, problem.id, repeat) for repeat in range(self.batch)]
        started = time.perf_counter()
        outputs = self.llm.generate([problem.prompt] * self.batch, [params_of(section, self.unit, s) for s in seeds])
        self.seconds += time.perf_counter() - started
        for (sample,) in (output.outputs for output in outputs):
            assert sample.metrics.finished_time is not None
            self.latencies.append(sample.metrics.finished_time - sample.metrics.arrival_time)
            self.tokens += len(sample.token_ids)
            self.decoded += max(0, len(sample.token_ids) - 1)
            self.flops += sample.decode_flops or 0

    def row(self, rounds: int) -> dict[str, Any]:
        by_round = np.reshape(self.latencies, (rounds, -1)).mean(1)
        return {
            "variant": self.unit.variant,
            "title": self.unit.title,
            "unit": self.unit.id,
            "batch": self.batch,
            "requests": len(self.latencies),
            "latency_seconds": float(np.mean(self.latencies)),
            "latency_rounds": by_round.tolist(),
            "tokens_per_second": self.tokens / self.seconds,
            "flops_per_token": self.flops / max(1, self.decoded),
        }


def measure_runtime(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    section, asked = shop.plan.study.runtime, shop.plan.study.generate
    named = timed_units(shop.plan.study, shop.plan.units)
    problems = world_of(named[0]).problems(section.problems, asked.seed)
    longest = max(len(problem.prompt) for problem in problems) + asked.max_tokens
    rows = []
    for number, batch in enumerate(section.batches):
        clocks = [
            Clock(unit, make_llm(shop.root / unit.model, unit, batch, longest, enable_prefix_caching=False), batch)
            for unit in named
        ]
        for clock in clocks:  # once unmeasured
            clock.llm.generate([problems[0].prompt], params_of(asked, clock.unit, 0))
        for turn in range(section.rounds):
            for problem in problems:
                for clock in clocks:
                    clock.answer(problem, asked)
            tell((number + (turn + 1) / section.rounds) / len(section.batches))
        rows += [clock.row(section.rounds) for clock in clocks]
    path = shop.root / RUNTIME
    write_summary(path, {"rows": rows})
    return digest_files([path])
