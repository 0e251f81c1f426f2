"""Requests made from the API's own description, right and wrong ones: nothing breaks, nothing hangs.

`TAH2_FUZZ_EXAMPLES=500` looks longer than continuous integration does, and at every value once.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import ServerProcess

EXAMPLES = int(os.environ.get("TAH2_FUZZ_EXAMPLES", "5"))
LONG = EXAMPLES >= 100
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def fuzzed(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server whose answers are short, whatever they are asked for."""
    made = ServerProcess(checkpoint, "--max-model-len", "64")
    yield made
    assert made.stop() == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_no_request_breaks_the_server(fuzzed: ServerProcess, tmp_path: Path):
    phases = "fuzzing,coverage" if LONG else "fuzzing"
    command = ["run", f"{fuzzed.url}/openapi.json", "--phases", phases, "--max-examples", str(EXAMPLES)]
    command += [
        "--checks",
        CHECKS,
        "--request-timeout",
        "60",
        "--generation-deterministic",
        "--suppress-health-check",
        "all",
    ]
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        capture_output=True,
        text=True,
        timeout=3600 if LONG else 300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert fuzzed.http.get("/health").status_code == 200
    assert fuzzed.metric("num_requests_running") == fuzzed.metric("kv_slots_used") == 0
    assert len([event for event in fuzzed.events if event["event"] == "worker started"]) == 1
    assert [event for event in fuzzed.events if event["level"] in ("error", "critical")] == []
