"""One checkpoint and one server for all tests of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tah2.engine.llm import LLM
from tests.server.process import ServerProcess
from tests.server.tiny import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(checkpoint, "--served-model-name", "tiny", "other-name")
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="session")
def offline(checkpoint: Path) -> LLM:
    """The same model without a server."""
    return LLM(checkpoint, kernels="off", kv_slots=20000, device="cpu")


@pytest.fixture(scope="session")
def tokenizer(offline: LLM) -> Any:
    return offline.tokenizer
