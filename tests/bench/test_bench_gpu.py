"""The GPU benchmark runs anywhere in its quick form, and says where its full form cannot."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tah2.bench.gpu import TARGETS
from tah2.cli.frame import main


def test_the_quick_benchmark_prints_every_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, threads = tmp_path / "bench.json", torch.get_num_threads()
    assert main(["bench", "gpu", "--quick", "--json", "--threads", str(threads), "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert set(report["ratios"]) == set(report["targets"]) == set(TARGETS)
    assert all(ratio > 0 and math.isfinite(ratio) for ratio in report["ratios"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_full_benchmark_says_what_to_do(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "gpu"]) == 2
    assert "tah2 bench decode" in capsys.readouterr().err
