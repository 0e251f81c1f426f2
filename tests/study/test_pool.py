"""Workers of a study do not outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from tests.study.watching import hold_a_worker


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
