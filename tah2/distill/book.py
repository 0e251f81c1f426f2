"""The answers of a run: one JSON object per line, append-only, so that a killed run loses no whole line.

Lines stand in the order in which answers came. `AnswerBook` keeps where each line begins, not its content, so a book
may be larger than memory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from tah2.config.strict import ConfigError
from tah2.evals.records import drop_torn_line

Key = tuple[str, int]
"""(prompt, sample)"""


class AnswerBook:
    """Open it in `with`: that drops a torn last line, finds what is answered, and keeps other processes out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[Key, int] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> AnswerBook:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab+", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(
                f"Another process is writing to {self.path.parent}: wait for it, or choose another 'out'."
            ) from None
        drop_torn_line(self.path)
        self._file = file
        with self.path.open("rb") as lines:
            place = 0
            for number, line in enumerate(lines, start=1):
                self._places[self._key(line, number)] = place
                place += len(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, answer: Mapping[str, Any]) -> None:
        """`answer` has `key` and `sample`; its line is handed to the operating system whole and at once."""
        assert self._file is not None
        place = self._file.seek(0, os.SEEK_END)
        data = json.dumps(answer, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, "the disk is full", str(self.path))
        self._places[answer["key"], answer["sample"]] = place

    def read(self, key: Key) -> dict[str, Any] | None:
        if key not in self._places:
            return None
        assert self._file is not None
        with self.path.open("rb") as lines:
            lines.seek(self._places[key])
            found: dict[str, Any] = json.loads(lines.readline())
        return found

    def _key(self, line: bytes, number: int) -> Key:
        try:
            answer = json.loads(line)
            return answer["key"], answer["sample"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"Line {number} of {self.path} is not an answer; mend it or move the file away."
            ) from None
