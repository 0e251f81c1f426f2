"""What is done: every stage leaves a marker with a key, the digest of all that went into it.

A stage whose marker holds the key that its inputs give today is not run again. Outputs have digests too, which are
inputs of later stages; so a change runs again what it changes and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tah2.config.strict import plain
from tah2.evals.manifest import commit
from tah2.evals.records import SampleRecord
from tah2.study.layout import BASES, STAGES, UNITS
from tah2.study.plan import WHOLE, Task
from tah2.train.summary import write_summary

VERSIONS = {"base": 1, "train": 1, "validate": 1, "generate": 1, "grade": 1, "runtime": 1, "analyse": 1, "report": 1}
"""Part of every key: raise a stage's number when the same inputs would give it other outputs."""


class Ledger:
    """The markers under one study's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def marker(self, task: Task) -> Path:
        if task.stage in WHOLE:
            return self.root / STAGES / f"{task.stage}.json"
        return self.root / (BASES if task.stage == "base" else UNITS) / task.subject / STAGES / f"{task.stage}.json"

    def entry(self, task: Task) -> dict[str, Any] | None:
        """`key`, `output` (a digest), `seconds`, `commit`; None where the stage has not finished."""
        path = self.marker(task)
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def is_done(self, task: Task, key: str) -> bool:
        entry = self.entry(task)
        return entry is not None and entry["key"] == key

    def output(self, task: Task) -> str | None:
        entry = self.entry(task)
        return None if entry is None else str(entry["output"])

    def close(self, task: Task, key: str, output: str, seconds: float) -> None:
        """The stage is done: its outputs lie on the disk whole."""
        made = {"key": key, "output": output, "seconds": round(seconds, 3), "commit": commit()}
        write_summary(self.marker(task), made)


def key_of(stage: str, inputs: Any) -> str:
    """The digest of JSON-like `inputs`, and of the stage's version."""
    text = json.dumps([stage, VERSIONS[stage], plain(inputs)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def digest_files(paths: Iterable[Path]) -> str:
    """Of names and contents."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()[:32]


def digest_data(paths: Iterable[Path]) -> str:
    """Of names and contents of files that may be large: one that has not been touched is not read again."""
    stats = [(path, path.stat()) for path in sorted(paths)]
    known = [_digest_once(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return hashlib.sha256("".join(known).encode()).hexdigest()[:32]


@lru_cache(maxsize=4096)
def _digest_once(path: Path, size: int, modified: int) -> str:
    return digest_files([path])


def digest_model(folder: Path) -> str:
    """Of weights and config of a checkpoint, or of a single file (GGUF)."""
    if folder.is_file():
        return digest_files([folder])
    return digest_files([*folder.glob("*.safetensors"), folder / "config.json"])


def digest_records(records: Iterable[SampleRecord]) -> str:
    """Of responses in any order, without timings."""
    rows = sorted(json.dumps(record.untimed(), sort_keys=True) for record in records)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:32]
