"""A tiny looped chat model on disk, with a byte-level tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tah2.model.hf import LoopedForCausalLM
from tah2.model.hf_config import LoopedConfig
from tests.data.conftest import tokenizer  # noqa: F401
from tests.train.runs import SHAPE


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:  # noqa: F811
    """A random TaH2 model whose vocabulary is the tokenizer's."""
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    loop = {"kind": "tah2", "max_depth": 2, "updater_width": 8, "decider_width": 8, "decider_top_k": 4}
    model = LoopedForCausalLM(LoopedConfig(backbone=shape, loop=loop))
    model.model.reset()
    folder = tmp_path_factory.mktemp("student")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
