"""Raw rows of a source, one after another, each with the place it came from.

Rows stay undecoded until they are needed, so that skipping over rows when a streamed run resumes is cheap.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.data.config import SourceConfig
from tah2.data.conversation import without_nulls
from tah2.data.report import BadRow

JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)


@dataclass(frozen=True)
class RawRow:
    """One row: `number` counts the rows of its source from 0; `where` is for people (`file:line`)."""

    number: int
    where: str
    payload: bytes | Mapping[str, Any]

    def load(self) -> Mapping[str, Any]:
        if not isinstance(self.payload, bytes):
            return self.payload
        try:
            row = json.loads(self.payload.decode("utf-8-sig"))
        except ValueError as error:
            raise BadRow("not JSON", str(error)) from None
        if not isinstance(row, dict):
            raise BadRow("not an object", f"the line holds {type(row).__name__}")
        return row


@dataclass(frozen=True)
class Source:
    """An opened source: iterate `rows()` as often as wanted; `fingerprint` names its content."""

    config: SourceConfig
    paths: tuple[Path, ...] = ()
    table: Any = None
    """A data set of the `datasets` library, when there are no files to read directly."""

    def rows(self) -> Iterator[RawRow]:
        found = self._file_rows() if self.paths else self._table_rows()
        for number, (where, payload) in enumerate(islice(found, self.config.limit)):
            yield RawRow(number, where, payload)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
        digest.update(str(getattr(self.table, "_fingerprint", "")).encode())
        return digest.hexdigest()

    def _file_rows(self) -> Iterator[tuple[str, bytes | Mapping[str, Any]]]:
        for path in self.paths:
            yield from read_parquet(path) if path.suffix in PARQUET_SUFFIXES else read_json_lines(path)

    def _table_rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, row in enumerate(self.table):
            yield f"{self.config.label}:{number}", without_nulls(row)


def open_source(config: SourceConfig, streaming: bool = False) -> Source:
    """Find the files of a source, or open it with the `datasets` library."""
    if config.path:
        return Source(config, tuple(local_files(config.path)))
    if config.files:
        return Source(config, tuple(hub_files(config)))
    library = require("datasets", f"Reading the data set {config.id!r}")
    try:
        table = library.load_dataset(
            config.id, config.name, split=config.split, revision=config.revision, streaming=streaming
        )
    except Exception as error:  # the library raises many kinds for a wrong name, split or a missing network
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"Cannot load the data set {config.id!r} (split {config.split!r}): {reason}") from error
    return Source(config, table=table)


def read_json_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Lines of a JSONL file; only "\\n" ends a line, as text may hold U+2028 and other Unicode line ends."""
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    parquet = require("pyarrow.parquet", f"Reading {path}")
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        for row in batch.to_pylist():
            yield f"{path}:row {number}", without_nulls(row)
            number += 1


def local_files(path: str) -> list[Path]:
    """The data files that `path` names: a file, a folder or a pattern; sorted by name."""
    root = Path(path).expanduser()
    if root.is_dir():
        found = [entry for entry in root.rglob("*") if entry.suffix in (*JSON_SUFFIXES, *PARQUET_SUFFIXES)]
    elif root.is_file():
        found = [root]
    else:
        found = [Path(entry) for entry in glob.glob(str(root), recursive=True)]
    if not found:
        raise ConfigError(
            f"There are no data files at {path!r}: give a .jsonl or .parquet file, a folder or a pattern."
        )
    for entry in found:
        if entry.suffix not in (*JSON_SUFFIXES, *PARQUET_SUFFIXES):
            raise ConfigError(f"Cannot read {str(entry)!r}: data files end in .jsonl or .parquet.")
    return sorted(found)


def hub_files(config: SourceConfig) -> list[Path]:
    """The named files of a Hugging Face data set, fetched once into the library's own cache."""
    hub = require("huggingface_hub", f"Fetching files of {config.id!r}")
    names = list(config.files)
    try:
        if any(set(name) & set("*?[") for name in names):
            listed = hub.HfApi().list_repo_files(config.id, repo_type="dataset", revision=config.revision)
            names = [entry for name in names for entry in sorted(fnmatch.filter(listed, name))]
        fetched = [
            Path(hub.hf_hub_download(config.id, name, repo_type="dataset", revision=config.revision)) for name in names
        ]
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"Cannot fetch the files of the data set {config.id!r}: {reason}") from error
    if not fetched:
        raise ConfigError(f"No file of the data set {config.id!r} matches {', '.join(config.files)}.")
    return fetched


def require(module: str, purpose: str) -> Any:
    """Import an optional library, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ConfigError(f"{purpose} needs the library {package!r}: install tah2 with its extra 'data'.") from None
