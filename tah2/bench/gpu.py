"""`tah2 bench gpu`: what decoding costs on a GPU, as ratios measured side by side on the same bf16 weights.

| ratio | of | over |
|---|---|---|
| tah2_over_standard_latency_b1, _b4, _b16 | TaH2's time per token (M = 2, mean depth 1.2) | Standard's |
| flops_over_standard | FLOPs of that decoding, exact from the recorded depths, at batch 16 | Standard's |
| depth_batching_over_lockstep_b16_m4 | throughput of plain depth batching (M = 4, mean depth 1.2) | the same engine where everybody waits for the deepest |
| graphs_over_modules_b1, _b16 | Standard's tokens per second with CUDA graphs | without them |
| over_transformers_b1, _b8 | Standard's tokens per second | transformers' `generate` |
| bandwidth_share_b1 | bytes of weights that Standard reads per second at batch 1 | summing as large a tensor |

The weights are random, of Qwen3-1.7B's shape, and tokens are drawn at temperature 1. Depths are controlled: the decider
answers 1 - (the largest probability), and an exit threshold is found under which the mean depth is 1.2; the updater
returns the token's own embedding, so that most drafts of next tokens hold (`draft_agreement`). Prefill is not part of
the times. Times are the best of interleaved rounds.
"""  # noqa: E501

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tah2.bench.decoders import (
    Engines,
    Ids,
    Stretch,
    TransformersPeer,
    decode,
    make_random_models,
    side_by_side,
    threshold_of_depth,
)
from tah2.bench.machine import describe
from tah2.config.strict import ConfigError
from tah2.engine.engine import Engine

MEAN_DEPTH = 1.2
TARGETS = {
    "tah2_over_standard_latency_b1": "the paper's engine: 1.34",
    "tah2_over_standard_latency_b4": "the paper's engine: 1.30",
    "tah2_over_standard_latency_b16": "at most FLOPs + 3%",
    "flops_over_standard": "",
    "depth_batching_over_lockstep_b16_m4": "at least 1.3",
    "graphs_over_modules_b1": "more than 1",
    "graphs_over_modules_b16": "more than 1",
    "over_transformers_b1": "at least 1.8",
    "over_transformers_b8": "at least 2",
    "bandwidth_share_b1": "",
}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured; the quick plan runs anywhere and its figures say nothing."""

    rounds: int
    model: str
    device: str
    dtype: torch.dtype
    prompt: int
    each: dict[int, int] = field(hash=False)
    """Batch -> output tokens per prompt."""
    kv_memory_gib: float


FULL = Plan(3, "qwen3-1.7b", "cuda", torch.bfloat16, 256, {1: 128, 4: 64, 8: 32, 16: 32}, 16.0)
QUICK = Plan(1, "qwen3-tiny", "cpu", torch.float32, 8, {1: 4, 4: 4, 8: 4, 16: 4}, 1.0)


def measure(plan: Plan, threads: int | None = None, say: Say = lambda line: None) -> dict[str, Any]:
    """Run the plan; `say` hears what is being measured."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("There is no GPU here; 'tah2 bench decode' measures a CPU, '--quick' runs anywhere.")
    if threads is not None:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        bench = _Bench(plan, say)
        raw: dict[str, Any] = {f"b{batch}": bench.tah2(batch) for batch in (1, 4, 16)}
        raw |= {
            "lockstep": bench.lockstep(),
            "modules": {f"b{batch}": bench.against_modules(batch) for batch in (1, 16)},
            "transformers": {f"b{batch}": bench.against_transformers(batch) for batch in (1, 8)},
            "bandwidth": bench.bandwidth(raw["b1"]["seconds_per_token"]["standard"]),
        }
    ratios = {
        **{f"tah2_over_standard_latency_b{batch}": _over(raw[f"b{batch}"], "tah2", "standard") for batch in (1, 4, 16)},
        "flops_over_standard": raw["b16"]["flops_over_standard"],
        "depth_batching_over_lockstep_b16_m4": _over(raw["lockstep"], "lockstep", "depth_batching"),
        **{
            f"graphs_over_modules_b{batch}": _over(raw["modules"][f"b{batch}"], "modules", "graphs")
            for batch in (1, 16)
        },
        **{f"over_transformers_b{n}": _over(raw["transformers"][f"b{n}"], "transformers", "standard") for n in (1, 8)},
        "bandwidth_share_b1": raw["bandwidth"]["share"],
    }
    return {"ratios": ratios, "targets": TARGETS, "raw": raw, "machine": describe(torch.device(plan.device))}


class _Bench:
    def __init__(self, plan: Plan, say: Say) -> None:
        self.plan, self.say = plan, say
        say(f"making {plan.model}")
        self.models = make_random_models(plan.model, (2, 4), torch.device(plan.device), plan.dtype)
        longest = plan.prompt + 8 * max(plan.each.values())
        self.engines = Engines(self.models, longest, plan.kv_memory_gib)
        self.modules = Engines(self.models, longest, plan.kv_memory_gib, recorded=False)

    def tah2(self, batch: int) -> dict[str, Any]:
        """TaH2 with and without drafts of next tokens, against Standard."""
        self.say(f"TaH2 against Standard, batch {batch}")
        drafting, plain = self.engines.tah2(2), self.engines.tah2(2, wavefront=False)
        threshold = self._threshold(plain, batch)
        return self._compare(
            batch,
            {
                "standard": (self.engines.standard(), None),
                "tah2": (drafting, threshold),
                "no_drafts": (plain, threshold),
            },
        )

    def lockstep(self) -> dict[str, Any]:
        self.say("depth batching against lock-step batching, batch 16")
        free, locked = self.engines.tah2(4, wavefront=False), self.engines.tah2(4, lockstep=True)
        threshold = self._threshold(free, 16)
        return self._compare(16, {"depth_batching": (free, threshold), "lockstep": (locked, threshold)})

    def against_modules(self, batch: int) -> dict[str, Any]:
        self.say(f"CUDA graphs against the model's modules, batch {batch}")
        return self._compare(
            batch, {"graphs": (self.engines.standard(), None), "modules": (self.modules.standard(), None)}
        )

    def against_transformers(self, batch: int) -> dict[str, Any]:
        """Greedy on both sides."""
        self.say(f"Standard against transformers, batch {batch}")
        ours, theirs = self.engines.standard(), TransformersPeer(self.models)
        prompts, each = self._work(batch)
        seconds: dict[str, list[float]] = {"standard": [], "transformers": []}
        for _ in range(1 + self.plan.rounds):
            seconds["standard"].append(decode(ours, prompts, each).per_token)
            seconds["transformers"].append(theirs.decode(prompts, each)[0] / (batch * each))
        found = {"seconds_per_token": {name: rounds[1:] for name, rounds in seconds.items()}}
        self._tell(found)
        return found

    def bandwidth(self, per_token: list[float]) -> dict[str, Any]:
        """Every weight of Standard is read once per token; the yardstick reads as many bytes."""
        decoder = self.models.standard
        read = [*decoder.layers.parameters(), decoder.head_weight]
        weights = sum(weight.numel() * weight.element_size() for weight in read)
        tensor = torch.ones(weights // 2, dtype=torch.bfloat16, device=self.plan.device)
        times = []
        for _ in range(5):
            self._wait()
            started = time.perf_counter()
            tensor.sum()
            self._wait()
            times.append(time.perf_counter() - started)
        return {"share": min(times) / min(per_token), "weights_bytes": weights, "read_seconds": times}

    def _compare(self, batch: int, contenders: dict[str, tuple[Engine, float | None]]) -> dict[str, Any]:
        prompts, each = self._work(batch)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(1 + self.plan.rounds):
            runs = side_by_side(
                *(Stretch(engine, prompts, each, threshold, 1.0) for engine, threshold in contenders.values())
            )
            for name, run in zip(contenders, runs, strict=True):
                seconds[name].append(run.per_token)
        found: dict[str, Any] = {"seconds_per_token": {name: rounds[1:] for name, rounds in seconds.items()}}
        self._tell(found)
        by_name = dict(zip(contenders, runs, strict=True))
        found["mean_depth"] = {name: run.mean_depth for name, run in by_name.items()}
        found["draft_agreement"] = {name: run.agreement for name, run in by_name.items()}
        if "standard" in by_name:
            found["flops_over_standard"] = by_name["tah2"].flops / by_name["standard"].flops
        return found

    def _tell(self, found: dict[str, Any]) -> None:
        best = (f"{name} {1000 * min(rounds):.2f}" for name, rounds in found["seconds_per_token"].items())
        self.say(f"  milliseconds per token: {', '.join(best)}")

    def _threshold(self, engine: Engine, batch: int) -> float:
        prompts, each = self._work(batch)
        return threshold_of_depth(engine, prompts, each, MEAN_DEPTH, tries=4, temperature=1.0)

    def _work(self, batch: int) -> tuple[Ids, int]:
        return self.models.prompts(batch, self.plan.prompt), self.plan.each[batch]

    def _wait(self) -> None:
        if self.plan.device == "cuda":
            torch.cuda.synchronize()


def _over(measured: dict[str, Any], one: str, other: str) -> float:
    """How many times longer `one` takes than `other`."""
    seconds = measured["seconds_per_token"]
    return float(min(seconds[one]) / min(seconds[other]))
