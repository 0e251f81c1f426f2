"""One record per sample, in an append-only file that a killed process leaves readable.

A record keeps what later questions need and no generation can answer twice: token ids, the depth that each took, and
how many prompt tokens keep keys of which depth. Decoding FLOPs of the response, and of every prefix of it, follow
from these (`FlopsModel`); so does its text at any output limit.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tah2.config.strict import ConfigError

Key = tuple[str, int]
"""(problem, repeat): one sample of a task."""

ERROR = "error"
"""The finish reason of a sample that has to be generated again."""

TIMINGS = ("seconds", "first_token_seconds")
"""Fields that two runs of the same sample need not share."""

_SEEDS = 1 << 31
_STRIDE = 0x9E3779B1
"""Odd, so that `repeat * _STRIDE` modulo a power of two is different for every repeat."""


@dataclass(frozen=True)
class SampleRecord:
    task: str
    problem: str
    repeat: int
    seed: int
    prompt_tokens: int
    prompt_depth_counts: list[int]
    """[m - 1]: prompt tokens whose keys are kept at exactly m iterations; empty where depths are unknown."""
    token_ids: list[int]
    depths: list[int]
    """[i]: iterations of the position that token i was drawn from, so depths[0] belongs to the prompt's last token."""
    text: str
    finish_reason: str
    """"stop", "length" or "error"; a multi-turn task's episode has its own words."""
    decode_flops: int | None = None
    """Of every output token but the first, which belongs to the prompt's pass; None where depths are unknown."""
    seconds: float | None = None
    """From submission to the last token: waiting in the queue of a busy engine is part of it."""
    first_token_seconds: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Task-specific; `error` says what went wrong."""

    @property
    def key(self) -> Key:
        return self.problem, self.repeat

    @property
    def mean_depth(self) -> float | None:
        return sum(self.depths) / len(self.depths) if self.depths else None

    def untimed(self) -> dict[str, Any]:
        """Everything that a repetition of this sample reproduces."""
        values = dataclasses.asdict(self)
        for name in TIMINGS:
            del values[name]
        return values


def sample_seed(seed: int, task: str, problem: str, repeat: int) -> int:
    """The seed of one sample: 31 bits that depend on all four, never the same for two repeats of a problem."""
    name = json.dumps([seed, task, problem]).encode()
    base = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
    return (base + repeat * _STRIDE) % _SEEDS


def depth_counts(depths: Sequence[int], ceiling: int) -> list[int]:
    """How many of `depths` are exactly 1, 2, ..., `ceiling`."""
    counts = [0] * ceiling
    for depth in depths:
        counts[depth - 1] += 1
    return counts


class RecordFile:
    """Records of one task, one JSON object per line, written by one process.

    A line is handed to the operating system whole and at once, so a killed process loses at most the sample that it
    was about to write. Opening for append drops a last line that a crash of the machine has torn. A sample that
    failed may be recorded again; the later record then counts.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def append(self, record: SampleRecord) -> None:
        line = json.dumps(dataclasses.asdict(record), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
        data, file = line.encode("ascii") + b"\n", self._opened()
        if file.write(data) != len(data):
            self.close()
            raise OSError(errno.ENOSPC, "the disk is full", str(self.path))

    def __iter__(self) -> Iterator[SampleRecord]:
        """Every line in order of writing, without a torn last one."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield self._record(line, number)

    def read(self) -> list[SampleRecord]:
        """One record per sample, in order of problem and repeat; where a sample was recorded twice, the later one."""
        latest = {record.key: record for record in self}
        return [latest[key] for key in sorted(latest)]

    def keys(self) -> set[Key]:
        """Samples that need not be generated again."""
        done: set[Key] = set()
        for record in self:
            (done.discard if record.finish_reason == ERROR else done.add)(record.key)
        return done

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        return self._file

    def _record(self, line: bytes, number: int) -> SampleRecord:
        try:
            values = json.loads(line)
            return SampleRecord(**values)
        except (ValueError, TypeError):
            raise ConfigError(
                f"Line {number} of {self.path} is not a sample record; move the file away or mend it."
            ) from None


def drop_torn_line(path: Path) -> None:
    """Cut the file behind its last whole line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = keep = file.seek(0, os.SEEK_END)
        while keep:
            start = max(0, keep - (1 << 16))
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def same_samples(these: Sequence[SampleRecord], those: Sequence[SampleRecord]) -> bool:
    """Whether two runs recorded the same samples, timings aside."""
    mine, theirs = ({record.key: record.untimed() for record in records} for records in (these, those))
    return mine == theirs


def read_json_lines(path: str | Path) -> Iterator[Mapping[str, Any]]:
    """Objects of a JSON-lines file of ours, without a torn last line; nothing where the file is missing."""
    path = Path(path)
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)
