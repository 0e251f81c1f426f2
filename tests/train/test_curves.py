"""Logs become one picture, whatever they hold."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tah2.config.strict import ConfigError
from tah2.train.callbacks.base import RunInfo
from tah2.train.callbacks.jsonl import JsonlLog
from tah2.train.curves import plot_curves, read_curves, running_mean


def write_run(folder: Path, name: str, depths: int = 2, steps: int = 12) -> Path:
    log = JsonlLog()
    log.on_start(RunInfo(folder, name))
    for step in range(1, steps + 1):
        fade = math.exp(-step / steps)
        metrics = {"loss/prediction": 2 * fade, "optim/grad_norm": fade, "speed/tokens_per_second": 1000.0}
        metrics |= {"depth/mean": 1 + fade, "depth/1/share": 1.0, "depth/1/loss": 2 * fade}
        for m in range(1, depths):
            metrics |= {f"depth/{m + 1}/share": fade, f"depth/{m + 1}/loss_measured": fade + 1 / m}
            metrics |= {f"decider/{m}/{key}": fade / m for key in ("continue_rate", "label_rate", "agreement", "gain")}
        log.on_step(step, metrics)
        if step % 4 == 0:
            log.on_validation(step, {"loss/prediction": 2.1 * fade})
    log.on_end({"status": "finished"})
    return folder


def texts(svg: Path) -> str:
    """The picture's labels; SVG keeps them as comments beside the glyphs."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    return "|".join(str(node.text) for node in ElementTree.parse(svg, parser).iter() if node.text)


def test_curves_hold_every_step_once(tmp_path: Path):
    run = read_curves(write_run(tmp_path / "a", "run a", depths=3))
    assert (run.name, run.max_depth) == ("run a", 3)
    assert run.train["depth/mean"].steps == list(range(1, 13))
    assert run.train["depth/mean"].values[-1] == pytest.approx(1 + math.exp(-1))
    assert run.validation["loss/prediction"].steps == [4, 8, 12]


def test_gaps_stay_gaps(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss/prediction": null}\n{"kind": "step", "step": 2, "loss/prediction": 1}\n'
    )
    assert math.isnan(read_curves(tmp_path).train["loss/prediction"].values[0])
    assert running_mean([math.nan, 1.0, 3.0], 2) == [pytest.approx(math.nan, nan_ok=True), 1.0, 2.0]


def test_several_runs_share_one_picture(tmp_path: Path):
    logs = [write_run(tmp_path / "a", "standard", depths=1), write_run(tmp_path / "b", "looped", depths=2)]
    found = texts(plot_curves(logs, tmp_path / "deep" / "curves.svg"))
    assert [
        name for name in ("standard", "looped", "mean depth", "labelled 1", "validation") if name not in found
    ] == []


def test_a_run_of_one_depth_has_no_panels_about_depth(tmp_path: Path):
    found = texts(plot_curves([write_run(tmp_path / "a", "standard", depths=1)], tmp_path / "curves.svg"))
    assert "prediction loss" in found
    assert "mean depth" not in found
    assert "agreement" not in found


def test_long_runs_and_equal_names_become_a_png(tmp_path: Path):
    logs = [write_run(tmp_path / name, "twin", steps=300) for name in ("a", "b")]
    out = plot_curves(logs, tmp_path / "curves.png")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_missing_and_empty_logs_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no training log at"):
        read_curves(tmp_path / "nowhere")
    JsonlLog().on_start(RunInfo(tmp_path, "run"))
    with pytest.raises(ConfigError, match="holds no training step yet"):
        plot_curves([tmp_path], tmp_path / "curves.png")
    with pytest.raises(ConfigError, match="at least one"):
        plot_curves([], tmp_path / "curves.png")
