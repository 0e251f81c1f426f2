"""`tah2 bench decode`: what decoding costs, as ratios measured side by side on the same fp32 weights.

| ratio | of | over | target |
|---|---|---|---|
| tah2_over_standard_latency_b1, _b4, _b16 | TaH2's time per token (M = 2, mean depth 1.2) | Standard's | b1: <= 1.10; else flops_over_standard + 3% |
| flops_over_standard | FLOPs of that decoding, exact from the recorded depths, at batch 16 | Standard's | (a yardstick) |
| depth_batching_over_lockstep_b16_m4 | throughput of plain depth batching (M = 4, mean depth 1.2) | the same engine where everybody waits for the deepest | >= 1.3 |
| over_transformers_b1, _b8 | Standard's tokens per second | transformers' `generate` | >= 1.8, >= 2 |
| over_llamacpp_b1, _b8, _b16 | Standard's tokens per second | llama.cpp's, the same fp32 weights | >= 1, 1.4, 1.5 |
| bandwidth_share_b1 | bytes of weights that Standard reads per second at batch 1 | reading memory in order | >= 0.8 |
| overhead_share_b16 | time of a Standard step outside the model's computation at batch 16 | the step | < 0.05 |
| prefill_over_transformers | Standard's speed on a prompt of 512 tokens | transformers' | >= 1.3 |

Prefill is not part of the decoding times. A peer that cannot run is null here and named in `missing`. Depths are
controlled: the decider answers 1 - (the largest probability), so hard tokens continue, and an exit threshold is found
under which the mean depth is 1.2. Times are the best of interleaved rounds; `raw` has every round.
"""  # noqa: E501

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, mean, median
from typing import Any

import torch

from tah2.bench import llamacpp
from tah2.bench.decoders import (
    Decoded,
    Engines,
    Ids,
    Models,
    Stretch,
    Timed,
    TransformersPeer,
    decode,
    make_models,
    prefill,
    side_by_side,
    threshold_of_depth,
)
from tah2.bench.llamacpp import LlamaCppPeer
from tah2.bench.machine import describe
from tah2.bench.rounds import Ratio, interleaved
from tah2.engine import kernels

MEAN_DEPTH = 1.2
TARGETS = {
    "tah2_over_standard_latency_b1": "at most 1.10",
    "tah2_over_standard_latency_b4": "at most FLOPs + 3%",
    "tah2_over_standard_latency_b16": "at most FLOPs + 3%",
    "flops_over_standard": "",
    "depth_batching_over_lockstep_b16_m4": "at least 1.3",
    "over_transformers_b1": "at least 1.8",
    "over_transformers_b8": "at least 2",
    "over_llamacpp_b1": "at least 1",
    "over_llamacpp_b8": "at least 1.4",
    "over_llamacpp_b16": "at least 1.5",
    "bandwidth_share_b1": "at least 0.8",
    "overhead_share_b16": "less than 0.05",
    "prefill_over_transformers": "at least 1.3",
}
LLAMACPP_BATCHES = (1, 8, 16)
Say = Callable[[str], None]
Seconds = dict[str, list[float]]
"""Per contender and round"""


@dataclass(frozen=True)
class Plan:
    """What is measured; the quick plan checks that the benchmark works, its figures say nothing."""

    rounds: int
    model: str
    pocket: str
    """A small model, whose share of overhead is studied too."""
    prompt: int
    each: dict[int, int] = field(hash=False)
    """Batch -> output tokens per prompt."""
    prefill: int
    yardstick: int
    """Numbers that the bandwidth's yardstick reads."""
    square: int
    """Rows and columns of the product that prefill's speed is compared with."""
    contexts: tuple[int, ...]
    """Prompts of the pocket model whose decoding shows how the cost grows."""


FULL = Plan(
    rounds=5,
    model="smollm2-135m",
    pocket="qwen3-5m",
    prompt=32,
    each={1: 96, 4: 32, 8: 24, 16: 16},
    prefill=512,
    yardstick=64 << 20,
    square=2048,
    contexts=(256, 1024, 2048, 4096, 8192),
)
QUICK = Plan(1, "qwen3-tiny", "qwen3-tiny", 8, {1: 4, 4: 4, 8: 4, 16: 4}, 24, 1 << 16, 64, (16, 32, 48))


def measure(plan: Plan, threads: int | None = None, say: Say = lambda line: None) -> dict[str, Any]:
    """Run the plan; `say` hears what is being measured."""
    if threads is not None:
        torch.set_num_threads(threads)
    machine = describe(torch.device("cpu"))
    say(f"preparing {plan.model}")
    models = make_models(plan.model, (2, 4))
    pocket = models if plan.pocket == plan.model else make_models(plan.pocket, (2,))
    with torch.inference_mode():
        bench = _Bench(plan, models, say)
        raw: dict[str, Any] = {
            "weights": "pretrained" if bench.models.pretrained else "random",
            "kernels": kernels.available(),
            "b1": bench.against_transformers(1) | {"loop": bench.tah2(1)},
            "b4": {"loop": bench.tah2(4)},
            "b8": bench.against_transformers(8),
            "b16": {"loop": bench.tah2(16)},
            "bandwidth": bench.bandwidth(),
            "lockstep": bench.lockstep(),
            "overhead": bench.overhead(pocket),
            "prefill": bench.prefill(),
            "context": context_growth(pocket, plan, say),
            "llamacpp": bench.against_llamacpp(LLAMACPP_BATCHES),
        }
    ratios: dict[str, float | None] = {
        **{
            f"tah2_over_standard_latency_b{n}": raw[f"b{n}"]["loop"]["tah2_over_standard"]["of_best"]
            for n in (1, 4, 16)
        },
        "flops_over_standard": raw["b16"]["loop"]["flops_over_standard"],
        "depth_batching_over_lockstep_b16_m4": _best(raw["lockstep"], "depth_batching_over_lockstep"),
        **{f"over_transformers_b{n}": _best(raw[f"b{n}"], "over_transformers") for n in (1, 8)},
        **{f"over_llamacpp_b{n}": raw["llamacpp"].get(n, {}).get("of_best") for n in LLAMACPP_BATCHES},
        "bandwidth_share_b1": raw["bandwidth"]["share"],
        "overhead_share_b16": raw["overhead"][plan.model]["standard"],
        "prefill_over_transformers": _best(raw["prefill"], "over_transformers"),
    }
    return {
        "ratios": ratios,
        "targets": TARGETS,
        "missing": {f"over_llamacpp_b{n}": why for n in LLAMACPP_BATCHES if (why := llamacpp.missing())},
        "raw": raw,
        "machine": {**machine, "load_after": describe(torch.device("cpu"))["load"]},
    }


class _Bench:
    """The measurements of one model."""

    def __init__(self, plan: Plan, models: Models, say: Say) -> None:
        self.plan, self.models, self.say = plan, models, say
        self.length = plan.prefill + 16 * max(plan.each.values())
        self.engines = Engines(models, self.length)

    def against_transformers(self, batch: int) -> dict[str, Any]:
        self.say(f"Standard against transformers, batch {batch}")
        ours, theirs = self.engines.standard(), TransformersPeer(self.models)
        prompts, each = self._work(batch)
        timing: Seconds = {"standard": [], "transformers": []}
        for _ in range(1 + self.plan.rounds):
            beside = Stretch(ours, prompts, each)
            timing["transformers"].append(theirs.decode(prompts, each, beside)[0] / (batch * each))
            timing["standard"].append(beside.close().per_token)
        timing = _warm(timing)
        return {
            "over_transformers": _ratio(timing["transformers"], timing["standard"]),
            "same_tokens": self._agreement(theirs, batch),
            **_speeds(timing),
        }

    def against_llamacpp(self, batches: Sequence[int]) -> dict[int, Any]:
        """Batch -> Standard's tokens per second over llama.cpp's; empty where it is not installed."""
        if llamacpp.missing():
            return {}
        standard, threads = self.engines.standard(), torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder:
            peer = llamacpp.LlamaCppPeer(self.models.standard, Path(folder), max(batches), self.length, threads)
        measured = {}
        for batch in batches:
            self.say(f"Standard against llama.cpp, batch {batch}")
            prompts, each = self._work(batch)
            timing: Seconds = {"standard": [], "llamacpp": []}
            for _ in range(1 + self.plan.rounds):
                beside = Stretch(standard, prompts, each)
                timing["llamacpp"].append(peer.decode(prompts, each, beside)[0] / (batch * each))
                timing["standard"].append(beside.close().per_token)
            timing = _warm(timing)
            measured[batch] = _ratio(timing["llamacpp"], timing["standard"]) | _speeds(timing)
            measured[batch]["same_tokens"] = self._agreement(peer, batch)
        peer.close()
        return measured

    def _agreement(self, theirs: TransformersPeer | LlamaCppPeer, batch: int) -> float:
        """Share of the tokens up to the first difference; rounding may decide a close call in a long text."""
        prompts, each = self._work(batch)
        expected = theirs.decode(prompts, each)[1]
        ours = greedy(self.engines, prompts, each + 1)
        same = sum(_common(a, b) for a, b in zip(ours, expected, strict=True))
        return same / (batch * (each + 1))

    def tah2(self, batch: int) -> dict[str, Any]:
        self.say(f"TaH2 against Standard, batch {batch}")
        standard, tah2 = self.engines.standard(), self.engines.tah2(2)
        prompts, each = self._work(batch)
        threshold = threshold_of_depth(tah2, prompts, each, MEAN_DEPTH)
        timing, runs = self._rounds(
            {
                "standard": lambda: Stretch(standard, prompts, each),
                "tah2": lambda: Stretch(tah2, prompts, each, threshold),
            }
        )
        return {
            "tah2_over_standard": _ratio(timing["tah2"], timing["standard"]),
            "flops_over_standard": runs["tah2"].flops / runs["standard"].flops,
            "mean_depth": runs["tah2"].mean_depth,
            "draft_agreement": runs["tah2"].agreement,
            "exit_threshold": threshold,
            **_speeds(timing),
        }

    def lockstep(self) -> dict[str, Any]:
        self.say("depth batching against lock-step batching, batch 16")
        free, locked = self.engines.tah2(4, wavefront=False), self.engines.tah2(4, lockstep=True)
        prompts, each = self._work(16)
        threshold = threshold_of_depth(free, prompts, each, MEAN_DEPTH)
        timing, runs = self._rounds(
            {
                "depth_batching": lambda: Stretch(free, prompts, each, threshold),
                "lockstep": lambda: Stretch(locked, prompts, each, threshold),
            }
        )
        return {
            "depth_batching_over_lockstep": _ratio(timing["lockstep"], timing["depth_batching"]),
            "mean_depth": {name: run.mean_depth for name, run in runs.items()},
            "exit_threshold": threshold,
            **_speeds(timing),
        }

    def bandwidth(self) -> dict[str, Any]:
        self.say("bandwidth of Standard at batch 1")
        standard, reader = self.engines.standard(), kernels.Reader(self.plan.yardstick)
        prompts, each = self._work(1)
        weights = self._bytes_read()
        speeds: dict[str, list[float]] = {"decode": [], "read": []}
        for _ in range(1 + self.plan.rounds):
            stretch, read = Stretch(standard, prompts, each), []
            while not stretch.done:
                stretch.step()
                read.append(reader.bandwidth(1))
            speeds["decode"].append(weights / stretch.close().per_token)
            speeds["read"].append(1 / mean(1 / speed for speed in read))
        shares = [a / b for a, b in zip(speeds["decode"][1:], speeds["read"][1:], strict=True)]
        return {"share": max(shares), "of_rounds": shares, "weights_bytes": weights, "bytes_per_second": speeds}

    def _bytes_read(self) -> int:
        """Weights that one token reads: a tied embedding is read as the head."""
        decoder = self.models.standard
        read = [*decoder.layers.parameters(), *decoder.norm.parameters(), decoder.head_weight]
        return sum(weight.numel() * weight.element_size() for weight in read)

    def overhead(self, pocket: Models) -> dict[str, Any]:
        """Share of a step outside the model's computation, at batch 16: the least of the rounds."""
        benches = {models.name: _Bench(self.plan, models, self.say) for models in (self.models, pocket)}
        return {name: self._overhead(bench) for name, bench in benches.items()}

    @staticmethod
    def _overhead(bench: _Bench) -> dict[str, float]:
        bench.say(f"overhead of {bench.models.name} at batch 16")
        prompts, each = bench._work(16)
        engines = {"standard": bench.engines.standard(), "tah2": bench.engines.tah2(2)}
        threshold = threshold_of_depth(engines["tah2"], prompts, each, MEAN_DEPTH)
        least: dict[str, float] = {}
        for name, engine in engines.items():
            engine.runner.weights = Timed(engine.runner.weights)
            for _ in range(1 + bench.plan.rounds):
                share = decode(engine, prompts, each, threshold).overhead
                assert share is not None
                least[name] = min(share, least.get(name, 1.0))
        return least

    def prefill(self) -> dict[str, Any]:
        self.say(f"prefill of {self.plan.prefill} tokens")
        ours, theirs = self.engines.standard(), TransformersPeer(self.models)
        (prompt,) = self.models.prompts(1, self.plan.prefill)
        square = torch.ones(self.plan.square, self.plan.square)
        contenders: dict[str, Callable[[], object]] = {
            "standard": lambda: prefill(ours, prompt),
            "transformers": lambda: theirs.prefill(prompt),
            "product": lambda: square @ square,
        }
        timing = interleaved(contenders, self.plan.rounds, torch.device("cpu"))
        product = 2 * self.plan.square**3 / timing.pop("product").best
        weights = sum(weight.numel() for weight in self.models.standard.layers.parameters())
        return {
            "over_transformers": Ratio.of(timing["transformers"], timing["standard"]).plain(),
            # What is left to win: layers' products alone, over a large square product of PyTorch's in the same rounds.
            "share_of_product_speed": 2 * weights * len(prompt) / timing["standard"].best / product,
            "tokens_per_second": {name: len(prompt) / each.best for name, each in timing.items()},
            "rounds": {name: each.plain() for name, each in timing.items()},
        }

    def _work(self, batch: int) -> tuple[Ids, int]:
        return self.models.prompts(batch, self.plan.prompt), self.plan.each[batch]

    def _rounds(self, contenders: dict[str, Callable[[], Stretch]]) -> tuple[Seconds, dict[str, Decoded]]:
        """Seconds per token of every round, whose contenders take turns step by step; the last round's runs."""
        timing: Seconds = {name: [] for name in contenders}
        runs: dict[str, Decoded] = {}
        for _ in range(1 + self.plan.rounds):
            runs = dict(zip(contenders, side_by_side(*(begin() for begin in contenders.values())), strict=True))
            for name, run in runs.items():
                timing[name].append(run.per_token)
        return _warm(timing), runs


def context_growth(models: Models, plan: Plan, say: Say) -> dict[str, Any]:
    """Seconds per token at several lengths of context, and how far they are from a line in the visible keys."""
    each, found = plan.each[1], {}
    engines = Engines(models, plan.contexts[-1] + 2 * each)
    loops = {"standard": (engines.standard(), None), "tah2": (engines.tah2(2, wavefront=False), 0.0)}
    for name, (engine, threshold) in loops.items():
        say(f"{name} of {models.name} at contexts up to {plan.contexts[-1]}")
        depth = 1 if threshold is None else 2
        keys = [depth * (length + each / 2) for length in plan.contexts]
        rounds = [
            [decode(engine, models.prompts(1, length), each, threshold).per_token for length in plan.contexts]
            for _ in range(1 + plan.rounds)
        ]
        seconds = [min(column) for column in zip(*rounds[1:], strict=True)]
        slope, intercept = linear_regression(keys, seconds)
        off = max(abs(slope * key + intercept - each) / each for key, each in zip(keys, seconds, strict=True))
        found[name] = {
            "prompts": plan.contexts,
            "keys_at_the_deepest_pass": keys,
            "seconds_per_token": seconds,
            "seconds_per_thousand_keys": 1000 * slope,
            "seconds_without_keys": intercept,
            "farthest_from_the_line": off,
        }
    return found


def greedy(engines: Engines, prompts: Ids, tokens: int) -> Ids:
    """Standard's greedy output."""
    from tah2.engine.params import SamplingParams

    engine = engines.standard()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    done: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step(stream=False)}
    return [done[str(i)] for i in range(len(prompts))]


def _best(measured: dict[str, Any], ratio: str) -> float:
    return float(measured[ratio]["of_best"])


def _warm(timing: Seconds) -> Seconds:
    """Without the first round, which warms up."""
    return {name: seconds[1:] for name, seconds in timing.items()}


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _ratio(slow: list[float], fast: list[float]) -> dict[str, Any]:
    rounds = [a / b for a, b in zip(slow, fast, strict=True)]
    return {
        "of_best": min(slow) / min(fast),
        "median_of_rounds": median(rounds),
        "least": min(rounds),
        "most": max(rounds),
        "of_rounds": rounds,
    }


def _speeds(timing: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "tokens_per_second": {name: 1 / min(seconds) for name, seconds in timing.items()},
        "seconds_per_token": timing,
    }
