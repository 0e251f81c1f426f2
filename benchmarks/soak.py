"""200 streaming clients against `tah2 serve` on a small random model for a minute.

    python benchmarks/soak.py                       # exit code 1 and the reasons if something does not hold
    python benchmarks/soak.py --clients 400 --seconds 300

Prints one JSON object: requests, tokens per second, times between tokens, memory, and what the server still held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import torch

from tah2.bench.serve import prepare, serving
from tah2.bench.soak import Soak, SoakPlan, family, questions
from tah2.engine.llm import LLM


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a looped checkpoint (a small random one by default)")
    parser.add_argument("--clients", type=int, default=SoakPlan.clients)
    parser.add_argument("--seconds", type=float, default=SoakPlan.seconds)
    parser.add_argument("--p99-seconds", type=float, default=SoakPlan.p99_seconds)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = SoakPlan(clients=options.clients, seconds=options.seconds, p99_seconds=options.p99_seconds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or prepare("qwen3-tiny", Path(scratch) / "model")
        asked = questions(LLM(folder, device="cpu", dtype=torch.float32), plan.prompts)
        with serving(folder, 1) as server:
            soak = Soak(server.host, server.port, asked, plan)
            report = asyncio.run(soak.run(family(server.process.pid)))
    complaints = soak.complaints(report)
    print(json.dumps({**report, "complaints": complaints}, indent=2))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
