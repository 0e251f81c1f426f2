"""`tah2 bench train`: what training costs in time and memory, as ratios measured side by side.

| ratio | of | over | target |
|---|---|---|---|
| step_time_over_flops_ratio | TaH2's step time (M = 2, two fifths continue), over Standard's | the ratio of the FLOPs that both ran | <= 1.15 |
| flops_over_standard_paper_profile | TaH2's actual training FLOPs at the paper's depth profile | Standard's | <= 1.71 |
| peak_memory_over_standard_4k | TaH2's peak memory on 4,096 tokens | Standard's | <= 1.6 |
| throughput_over_transformers | Standard's tokens per second | transformers' on the same weights and data | >= 1 |
| memory_over_transformers | Standard's peak memory | transformers' | < 1 |

Each ratio of several models or workloads is the worst of them; every single one stands beside it. Times are of the best
of interleaved rounds. A GPU, where there is one, computes in bf16 on fp32 weights, ours and transformers' alike, and no
contender recomputes activations. The default sizes are a CPU's: `plan_of` makes a plan for one model of a GPU's size.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tah2.bench.machine import describe
from tah2.bench.memory import TRANSFORMERS, peak_of_step
from tah2.bench.rounds import Ratio, interleaved
from tah2.bench.steps import SHAPES, OurStep, TransformersStep, Workload, weights_of
from tah2.compute.published import TRAIN_CONTINUE, TRAIN_MEAN_KEYS, TRAIN_TOKENS
from tah2.compute.train import train_flops
from tah2.config.backbone import preset
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, suggestion
from tah2.train.parallel import World

TARGETS = {
    "step_time_over_flops_ratio": "at most 1.15",
    "flops_over_standard_paper_profile": "at most 1.71",
    "peak_memory_over_standard_4k": "at most 1.6",
    "throughput_over_transformers": "at least 1",
    "memory_over_transformers": "less than 1",
}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured; the quick plan checks that the benchmark works, its figures say nothing."""

    rounds: int
    workloads: dict[str, dict[str, Workload]]
    """Model -> name -> one global batch."""
    growth_model: str
    growth: tuple[int, ...]
    """Tokens of one document; 4,096 among them, or the largest stands in for it."""

    @property
    def four_k(self) -> int:
        return 4096 if 4096 in self.growth else self.growth[-1]


def _conversations(*lengths: int) -> Workload:
    return Workload(lengths, prompt=0.3)


FULL = Plan(
    rounds=5,
    workloads={
        "qwen3-5m": {
            "even": Workload((512,) * 4),
            "conversations": _conversations(620, 540, 410, 360, 300, 240, 180, 120),
        },
        "smollm2-135m": {"even": Workload((256,) * 4), "conversations": _conversations(310, 220, 170, 130)},
    },
    growth_model="qwen3-5m",
    growth=(1024, 2048, 4096, 8192, 16384),
)
QUICK = Plan(
    rounds=2,
    workloads={"qwen3-tiny": {"conversations": _conversations(20, 12)}},
    growth_model="qwen3-tiny",
    growth=(64,),
)


def plan_of(model: str, tokens: int) -> Plan:
    """One model alone, on four documents of `tokens` tokens in all; memory also on one document of as many."""
    if model not in SHAPES:
        raise ConfigError(f"Unknown model {model!r}{suggestion(model, SHAPES)}.")
    most = SHAPES[model]["max_position_embeddings"]
    if not 64 <= tokens <= most:
        raise ConfigError(f"'--tokens' lies between 64 and {most}, the longest document of {model}; not {tokens}.")
    even = Workload((tokens // 4,) * 4, prompt=0.3)
    return Plan(rounds=5, workloads={model: {"even": even}}, growth_model=model, growth=(tokens,))


def measure(plan: Plan, threads: int | None = None, say: Say = lambda line: None) -> dict[str, Any]:
    """Run the plan; `say` hears what is being measured."""
    if threads is not None:
        torch.set_num_threads(threads)
    with World.from_environment() as world:
        machine = describe(world.device)
        # Memory first, in processes of their own: afterwards this one holds what its models took of a GPU.
        memory = {
            model: {name: _memory(model, work, say, name) for name, work in works.items()}
            for model, works in plan.workloads.items()
        }
        growth = _growth(plan, say)
        times = {
            model: {name: _times(model, work, plan.rounds, world, say, name) for name, work in works.items()}
            for model, works in plan.workloads.items()
        }
    (four_k,) = [row for row in growth["rows"] if row["tokens"] == plan.four_k]
    every_time = [time for model in times.values() for time in model.values()]
    return {
        "ratios": {
            "step_time_over_flops_ratio": max(time["step_time_over_flops_ratio"]["of_best"] for time in every_time),
            "flops_over_standard_paper_profile": paper_profile(),
            "peak_memory_over_standard_4k": four_k["tah2_over_standard"],
            "throughput_over_transformers": min(time["throughput_over_transformers"]["of_best"] for time in every_time),
            "memory_over_transformers": max(
                work["standard_over_transformers"] for model in memory.values() for work in model.values()
            ),
        },
        "targets": TARGETS,
        "machine": {**machine, "load_after": describe(torch.device("cpu"))["load"]},
        "times": times,
        "memory": memory,
        "growth": growth,
    }


def paper_profile() -> float:
    """Actual training FLOPs of TaH2 M = 2 over Standard's, Qwen3-1.7B at the paper's depth profile and context."""
    backbone = preset("qwen3-1.7b")
    ours = train_flops(backbone, LoopConfig("tah2", 2), (TRAIN_CONTINUE,), TRAIN_MEAN_KEYS, TRAIN_TOKENS)
    standard = train_flops(backbone, LoopConfig("standard", 1), (), TRAIN_MEAN_KEYS, TRAIN_TOKENS)
    return ours.total_actual / standard.total_actual


def _times(model: str, work: Workload, rounds: int, world: World, say: Say, name: str) -> dict[str, Any]:
    """Steps of Standard, TaH2 and transformers on one batch, interleaved."""
    say(f"times of {model}, {name}: {len(work.lengths)} documents, {sum(work.lengths)} tokens")
    standard, tah2 = (OurStep(model, loop, work, world) for loop in ("standard", "tah2"))
    theirs = TransformersStep(model, work, world, standard)
    losses = {"standard": standard.loss(), TRANSFORMERS: theirs.loss()}
    if abs(losses["standard"] - losses[TRANSFORMERS]) > 0.02 * losses["standard"]:
        raise ValueError(f"Standard and transformers disagree about the loss of {model}: {losses}.")
    flops_ratio = tah2.flops.total_actual / standard.flops.total_actual
    timings = interleaved({"standard": standard, "tah2": tah2, TRANSFORMERS: theirs}, rounds, world.device)
    slowdown = Ratio.of(timings["tah2"], timings["standard"])
    return {
        "step_time_over_flops_ratio": slowdown.plain(1 / flops_ratio),
        "throughput_over_transformers": Ratio.of(timings[TRANSFORMERS], timings["standard"]).plain(),
        "work": {"lengths": list(work.lengths), "prompt": work.prompt},
        "weights": "pretrained" if weights_of(model) else "random",
        "flops": {"standard": standard.flops.total_actual, "tah2": tah2.flops.total_actual, "ratio": flops_ratio},
        "continued": tah2.continued,
        "loss": losses,
        "tokens_per_second": {system: sum(work.lengths) / timing.best for system, timing in timings.items()},
        "steps": {system: timing.plain() for system, timing in timings.items()},
    }


def _memory(model: str, work: Workload, say: Say, name: str) -> dict[str, Any]:
    say(f"memory of {model}, {name}")
    threads = torch.get_num_threads()
    peaks = {system: peak_of_step(model, system, work, threads) for system in ("standard", "tah2", TRANSFORMERS)}
    return {
        "standard_over_transformers": peaks["standard"].total / peaks[TRANSFORMERS].total,
        "tah2_over_standard": peaks["tah2"].total / peaks["standard"].total,
        **{system: peak.plain() for system, peak in peaks.items()},
    }


def _growth(plan: Plan, say: Say) -> dict[str, Any]:
    """Peaks of one document of growing length, and how far growth is from a straight line."""
    threads, rows = torch.get_num_threads(), []
    for tokens in plan.growth:
        say(f"memory of {plan.growth_model} on one document of {tokens} tokens")
        work = Workload((tokens,))
        standard, tah2 = (peak_of_step(plan.growth_model, loop, work, threads) for loop in ("standard", "tah2"))
        ratio = tah2.total / standard.total
        rows.append({"tokens": tokens, "tah2_over_standard": ratio, "standard": standard.plain(), "tah2": tah2.plain()})
    return {"model": plan.growth_model, "rows": rows, "bytes_per_token": _slopes(rows)}


def _slopes(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Further bytes per further token between neighbouring lengths: level where growth is linear."""
    return {
        system: [
            (after[system]["peak_bytes"] - before[system]["peak_bytes"]) / (after["tokens"] - before["tokens"])
            for before, after in pairwise(rows)
        ]
        for system in ("standard", "tah2")
    }
