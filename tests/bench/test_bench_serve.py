"""The server's benchmark runs, and compares the same tokens."""

from __future__ import annotations

import json

import pytest

from tah2.bench.serve import TARGETS
from tah2.cli.frame import main


@pytest.mark.slow
def test_the_quick_benchmark_prints_its_ratio(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["ratios"]) == set(report["targets"]) == set(TARGETS)
    assert report["ratios"]["server_over_offline_c16"] > 0
    assert len(report["raw"]["seconds"]["server"]) == len(report["raw"]["seconds"]["offline"]) == 1
