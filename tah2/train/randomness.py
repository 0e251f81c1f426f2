"""The states of every random generator of a process, as tensors that a checkpoint can hold.

Training itself draws from counters; these states are kept for what a user's own callbacks or layers draw.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """uint8 tensors by generator: Python's, NumPy's, torch's and that of the GPU in use."""
    states = {"python": _packed(random.getstate()), "torch": torch.get_rng_state()}
    name, keys, *rest = np.random.get_state(legacy=True)
    states["numpy"] = _packed([name, np.asarray(keys).tolist(), *rest])
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    version, keys, gauss = _unpacked(states["python"])
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = _unpacked(states["numpy"])
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _packed(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)


def _unpacked(state: Tensor) -> list:  # type: ignore[type-arg]
    values: list = json.loads(bytes(state.tolist()))  # type: ignore[type-arg]
    return values
