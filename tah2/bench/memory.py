"""Peak memory of one training step, each measured in a fresh process.

On CPU: the high-water mark of resident memory during the step (VmHWM, reset before it; the highest ever where the
system cannot reset it) less what the process held before it made the model. Large allocations go to the system
directly (glibc's mmap threshold), so that freed memory leaves the mark. On a GPU: the allocator's own peak.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tah2.bench.steps import OurStep, TransformersStep, Workload

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Peak:
    """Bytes. `state` are fp32 weights, gradients and both moments of AdamW; `beyond` is the rest of the peak."""

    total: int
    state: int

    @property
    def beyond(self) -> int:
        return self.total - self.state

    def plain(self) -> dict[str, int]:
        return {"peak_bytes": self.total, "state_bytes": self.state, "activation_bytes": self.beyond}


def peak_of_step(model: str, system: str, work: Workload, threads: int) -> Peak:
    """The peak of a step of `system` (a loop kind, or transformers) in a process of its own."""
    case = json.dumps({"model": model, "system": system, "threads": threads, **asdict(work)})
    done = subprocess.run(
        [sys.executable, "-m", __name__, case], env={**os.environ, **ALLOCATOR}, capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"The memory of {system} on {model} could not be measured: {done.stderr.strip()[-2000:]}")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def _measure(case: dict[str, Any]) -> Peak:
    import torch

    from tah2.train.parallel import World

    torch.set_num_threads(case["threads"])
    work, small = Workload(tuple(case["lengths"]), case["prompt"]), Workload((8, 8))
    with World.from_environment() as world:
        on_gpu = world.device.type == "cuda"
        if not on_gpu:
            _run(_contender("qwen3-tiny", case["system"], small, world))  # libraries and their pools are in memory now
        before = torch.cuda.memory_allocated(world.device) if on_gpu else _resident("VmRSS")
        contender = _contender(case["model"], case["system"], work, world)
        contender()  # the optimizer's moments exist from here on
        gc.collect()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(world.device)
        elif FORGET.exists():
            FORGET.write_text("5", encoding="ascii")
        contender()
        peak = torch.cuda.max_memory_allocated(world.device) if on_gpu else _resident("VmHWM")
        module = contender.model if isinstance(contender, TransformersStep) else contender.trainer.decoder
        state = 16 * sum(parameter.numel() for parameter in module.parameters())
    return Peak(peak - before, state)


def _contender(model: str, system: str, work: Workload, world: Any) -> OurStep | TransformersStep:
    if system == TRANSFORMERS:
        return TransformersStep(model, work, world)
    return OurStep(model, system, work, world, pretrained=False)


def _run(contender: OurStep | TransformersStep) -> None:
    contender()


def _resident(field: str) -> int:
    """VmRSS or VmHWM in bytes; elsewhere the highest resident size so far."""
    if STATUS.exists():
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure(json.loads(sys.argv[1])))) + "\n")
