"""Packed linear layers against `F.linear`, and what is read from logits against stock PyTorch, side by side in one run.

    python benchmarks/cpu_kernels.py [--json] [--threads 1,2] [--repetitions 25] [--storage fp32]

For each weight shape of SmolLM2-135M and each number of rows it prints how many times faster the packed layer is, and
the share of this machine's read bandwidth (measured in the same run) that it reaches. Small weights are timed over
enough copies to leave the caches, as a model's layers do. The ways take turns; ratios are those of the fastest run of
each layer, which other programs on the machine disturb least, with those of the medians beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.engine import kernels

SHAPES = {
    "attention output": (576, 576),
    "fused qkv": (576, 960),
    "gate and up": (576, 3072),
    "down": (1536, 576),
    "head": (576, 49152),
}
ROWS = (1, 2, 4, 8, 16, 64)
BEYOND_CACHES = 80 << 20


@dataclass(frozen=True)
class Timing:
    """Seconds of one way of doing a job made of parts."""

    best: float
    """Sum over the parts of each one's fastest run."""
    median: float
    """Median over repetitions of the whole job."""


def interleaved(ways: dict[str, list[Callable[[], object]]], repetitions: int) -> dict[str, Timing]:
    """Time every part of every way; ways take turns, the first turn is a warm-up."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(repetitions + 1):
        for name, parts in ways.items():
            marks = [time.perf_counter()]
            for part in parts:
                part()
                marks.append(time.perf_counter())
            seconds[name].append([end - start for start, end in pairwise(marks)])
    return {
        name: Timing(
            best=sum(min(runs) for runs in zip(*each[1:], strict=True)),
            median=statistics.median(sum(parts) for parts in each[1:]),
        )
        for name, each in seconds.items()
    }


def one_shape(
    inner: int, outputs: int, storage: kernels.Storage, reader: kernels.Reader, repetitions: int
) -> dict[int, dict[str, float]]:
    """Per number of rows: ratios and bandwidth share."""
    copies = max(1, round(BEYOND_CACHES / (4 * inner * outputs)))
    weights = [torch.randn(outputs, inner) / inner**0.5 for _ in range(copies)]
    packed = [kernels.pack_linear(weight, storage=storage) for weight in weights]
    stored_bytes = copies * inner * outputs * {"fp32": 4, "bf16": 2, "int8": 1}[storage]
    results: dict[int, dict[str, float]] = {}
    for rows in ROWS:
        x = torch.randn(rows, inner)
        times = interleaved(
            {
                "packed": [partial(layer, x) for layer in packed],
                "stock": [partial(F.linear, x, weight) for weight in weights],
                "reading": [reader.read],
            },
            repetitions,
        )
        ours, stock, reading = times["packed"], times["stock"], reader.memory.nbytes / times["reading"].best
        results[rows] = {
            "over_stock": stock.best / ours.best,
            "over_stock_median": stock.median / ours.median,
            "milliseconds": 1e3 * ours.best / copies,
            "gflops": 2e-9 * rows * inner * outputs * copies / ours.best,
            "read_gb_per_s": 1e-9 * reading,
            "bandwidth_share": stored_bytes / ours.best / reading,
        }
    return results


def of_logits(rows: int, repetitions: int) -> dict[str, float]:
    """How many times faster than stock PyTorch the kernels read rows of logits that SmolLM2's head has just made."""
    inner, outputs = SHAPES["head"]
    head, x = kernels.pack_linear(torch.randn(outputs, inner) / inner**0.5), 4 * torch.randn(rows, inner)
    logits, shares = head(x), torch.randn(rows, outputs).log_softmax(-1)
    own, earlier = ([kernels.Row(table, at) for at in range(rows)] for table in (logits, shares))
    weight, begin = torch.zeros(rows), partial(head, x)
    ours: dict[str, list[Callable[[], object]]] = {
        "nothing": [begin],
        "largest": [begin, partial(kernels.largest, logits)],
        "most_probable": [begin, partial(kernels.most_probable, logits, inner)],
        "mixture": [begin, partial(kernels.mix, own, earlier, weight)],
    }
    stock: dict[str, list[Callable[[], object]]] = {
        "nothing": [begin],
        "largest": [begin, partial(logits.argmax, -1)],
        "most_probable": [begin, partial(kernels.reference_most_probable, logits, inner)],
        "mixture": [begin, partial(kernels.reference_mix, logits, shares, weight)],
    }
    spent = [{name: timing.best for name, timing in interleaved(way, repetitions).items()} for way in (ours, stock)]
    quick, slow = ({name: each[name] - each["nothing"] for name in each if name != "nothing"} for each in spent)
    return {name: slow[name] / quick[name] for name in quick}


def error(storage: kernels.Storage) -> float:
    """Relative error of a product of normal weights and inputs, against double precision."""
    weight, x = torch.randn(3072, 576) / 24, torch.randn(16, 576)
    exact = F.linear(x.double(), weight.double())
    difference: Tensor = kernels.pack_linear(weight, storage=storage)(x) - exact
    return float(difference.norm() / exact.norm())


def measure(threads: list[int], storage: kernels.Storage, repetitions: int) -> dict[str, Any]:
    reader = kernels.Reader(BEYOND_CACHES // 4)
    results: dict[str, dict[int, dict[str, float]]] = {}
    load = os.getloadavg()[0]
    for count in threads:
        torch.set_num_threads(count)
        for name, (inner, outputs) in SHAPES.items():
            results[f"{name}, {count} threads"] = one_shape(inner, outputs, storage, reader, repetitions)
    head = [results[f"head, {threads[0]} threads"][rows] for rows in ROWS]
    return {
        "ratios": {
            **{f"head_over_stock_{rows}": each["over_stock"] for rows, each in zip(ROWS, head, strict=True)},
            "bandwidth_share_b1": head[0]["bandwidth_share"],
        },
        "compiled": kernels.available(),
        "storage": storage,
        "of_logits_over_stock": {f"{rows} rows": of_logits(rows, repetitions) for rows in (3, 13)},
        "relative_error": error(storage),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average_before": load,
        "cores": os.cpu_count(),
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, the first one feeds the ratios")
    parser.add_argument("--storage", choices=kernels.STORAGES, default="fp32")
    parser.add_argument("--repetitions", type=int, default=25)
    options = parser.parse_args()
    with torch.inference_mode():
        report = measure([int(n) for n in options.threads.split(",")], options.storage, options.repetitions)
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(f"compiled: {report['compiled']}, load average before: {report['load_average_before']:.2f}")
    for rows, faster in report["of_logits_over_stock"].items():
        print(f"logits, {rows:8}: " + ", ".join(f"{name} {times:.2f}x stock" for name, times in faster.items()))
    for name, by_rows in report["results"].items():
        for rows, each in by_rows.items():
            print(
                f"{name:28} rows {rows:3}: "
                f"{each['over_stock']:5.2f}x stock (medians {each['over_stock_median']:5.2f}x) "
                f"{each['milliseconds']:8.3f} ms {each['gflops']:6.1f} GFLOP/s "
                f"{each['bandwidth_share']:5.0%} of {each['read_gb_per_s']:.1f} GB/s"
            )


if __name__ == "__main__":
    main()
