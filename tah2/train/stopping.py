"""SIGTERM and SIGINT ask a run to stop; it does so after the current step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INSIST_AFTER = 1.0
"""Seconds after which a further SIGINT ends the run at once; launchers send the first one twice."""


class StopRequest:
    """Has somebody asked this process to stop?"""

    def __init__(self, aloud: bool = True) -> None:
        self.aloud = aloud
        self.asked: float | None = None

    def __bool__(self) -> bool:
        return self.asked is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: it only takes note, as the interrupted code may hold any lock."""
        if self.asked is None:
            self.asked = time.monotonic()
            if self.aloud:
                os.write(2, b"\nStopping after this step; start the same recipe again to go on.\n")
        elif number == signal.SIGINT and time.monotonic() - self.asked > INSIST_AFTER:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to SIGTERM and SIGINT; outside the main thread, whoever runs us there listens himself."""
        try:
            previous = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
