"""The log that is always written: one JSON object per line, in `metrics.jsonl` of the run's folder.

Every record has `kind` (start, step, validation, checkpoint, message, end), `step` and `time`; metrics lie beside
them under their own names, non-finite ones as null. A resumed run first drops what lies beyond the step that it
resumes from, so a curve holds every step once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tah2.config.strict import ConfigError
from tah2.train.callbacks.base import Callback, Level, Metrics, RunInfo

FILE_NAME = "metrics.jsonl"


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a log; a last line that was torn by a crash is left out."""
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
        except ValueError:
            if number == len(lines):
                return
            raise ConfigError(f"Line {number} of {path} is not a JSON record; move the file away or mend it.") from None
        yield record


class JsonlLog(Callback):
    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._step = 0

    def on_start(self, run: RunInfo) -> None:
        path = run.folder / FILE_NAME
        run.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _truncate(path, run.start_step)
        self._file, self._step = path.open("a", encoding="utf-8"), run.start_step
        self._write("start", {"name": run.name, "total_steps": run.total_steps})

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._write("step", metrics)

    def on_validation(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._write("validation", metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._write("checkpoint", {"path": str(path)}, step)

    def on_message(self, level: Level, text: str) -> None:
        self._write("message", {"level": level, "text": text})

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._write("end", summary)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, values: Mapping[str, Any], step: int | None = None) -> None:
        """One whole line, handed to the operating system at once: a killed process loses nothing."""
        if self._file is None:
            return
        record = {"kind": kind, "step": self._step if step is None else step, "time": round(time.time(), 3)}
        self._file.write(json.dumps(_finite({**values, **record}), allow_nan=False, default=str) + "\n")
        self._file.flush()


def _truncate(path: Path, start_step: int) -> None:
    """Keep the records up to `start_step` (none for a new run), replacing the file in one move."""
    kept = []
    if start_step > 0:
        kept = [
            record
            for record in read_records(path)
            if record.get("step", 0) <= start_step and record.get("kind") != "end"
        ]
    shorter = path.with_name(path.name + ".new")
    with shorter.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    shorter.replace(path)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
