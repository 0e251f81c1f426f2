"""Workers of a study do not outlive it, and time is measured while none of them works."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path

from tah2.study.plan import plan_study
from tah2.study.runner import Run
from tah2.study.shop import Shop
from tests.study.mini import mini
from tests.study.watching import Remembered, hold_a_worker


def test_time_is_measured_while_nothing_else_runs(tmp_path: Path):
    plan = plan_study(mini(tmp_path))
    run, busy = Run(Shop(tmp_path / "out", plan), Remembered(), 2), Future[float]()
    runtime, grade = plan.tasks["runtime"], plan.tasks["grade:standard-b0-s0"]
    assert run._ready({"runtime": runtime, grade.id: grade}, {}) == [grade]
    assert run._ready({"runtime": runtime}, {busy: grade}) == []
    assert run._ready({"runtime": runtime}, {}) == [runtime]
    assert run._ready({grade.id: grade}, {busy: runtime}) == []
    assert "runtime" in plan.tasks["analyse"].needs  # the summary's claims are about it


def test_a_killed_study_leaves_no_worker_behind():
    hears, tells = multiprocessing.Pipe(duplex=False)
    study = multiprocessing.get_context("spawn").Process(target=hold_a_worker, args=(tells,))
    study.start()
    assert hears.poll(120)
    worker = hears.recv()
    os.kill(study.pid or 0, signal.SIGKILL)
    study.join()
    for _ in range(600):
        if not _runs(worker):
            return
        time.sleep(0.1)
    raise AssertionError("The worker outlived its study.")


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as state:
            return state.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
