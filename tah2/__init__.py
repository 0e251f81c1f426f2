"""Turn a pretrained language model into an adaptive looped transformer.

Importing the package registers its checkpoints with transformers and costs nothing until they are used: the names
below are loaded on first access, and transformers is not imported before somebody needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tah2.registration import register_with_transformers

if TYPE_CHECKING:
    from tah2.engine.llm import LLM as LLM
    from tah2.engine.params import SamplingParams as SamplingParams
    from tah2.model.checkpoint import convert as convert
    from tah2.model.checkpoint import load as load
    from tah2.model.hf import LoopedConfig as LoopedConfig
    from tah2.model.hf import LoopedForCausalLM as LoopedForCausalLM

__version__ = "0.1.0"

_HOMES = {
    "LLM": "tah2.engine.llm",
    "convert": "tah2.model.checkpoint",
    "load": "tah2.model.checkpoint",
    "LoopedConfig": "tah2.model.hf",
    "LoopedForCausalLM": "tah2.model.hf",
    "SamplingParams": "tah2.engine.params",
}

__all__ = ["LLM", "LoopedConfig", "LoopedForCausalLM", "SamplingParams", "__version__", "convert", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
