"""Rows of a benchmark: from a local file, or from its Hugging Face id, in one set of field names.

The names of the local file are the names everywhere; a row from the hub is renamed on arrival. A local file may lie
in a password-protected zip archive, which is read in memory and never unpacked to disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError

DATA_VARIABLE = "TAH2_BENCHMARKS"

Row = dict[str, Any]
RenameRow = Callable[[Mapping[str, Any], int], Row | None]
"""A hub row and its number -> a row in local names, or None where it belongs to another subset."""
Companions = Callable[[list[Row], Path], tuple[str, ...]]
"""Adds to the rows what lies in other files of the folder; returns caveats, if something is absent."""


@dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub; `files` names JSON Lines files of its repository to read
    instead of its table."""

    id: str
    rename: RenameRow
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()
    gated: bool = False
    complete: Callable[[list[Row], Hub], None] | None = None
    """Adds to the renamed rows what lies in other files of the repository."""


@dataclass(frozen=True)
class Source:
    file: str
    """Name inside the data folder, `.jsonl` or `.jsonl.zip`."""
    hub: Hub | None
    password: bytes | None = None
    """Of the zip archive, published beside it: it keeps the questions from crawlers, not from people."""
    companions: Companions | None = None


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    rows: tuple[Row, ...] = field(repr=False)
    origin: str
    sha256: str
    caveats: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def data_folder(named: str | Path | None) -> Path | None:
    """The folder with local benchmark files: as named, else from TAH2_BENCHMARKS, else none."""
    folder = named if named is not None else os.environ.get(DATA_VARIABLE) or None
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise ConfigError(f"The benchmark folder {folder} does not exist; name an existing one or set {DATA_VARIABLE}.")
    return Path(folder)


def read_rows(source: Source, data_dir: str | Path | None = None) -> Rows:
    """The rows of `source`: its file in the data folder if that is there, else the hub."""
    folder = data_folder(data_dir)
    if folder is not None and (folder / source.file).is_file():
        return read_local(source, folder)
    if source.hub is None:
        where = f"in {folder}" if folder else f"(name its folder with --data-dir or {DATA_VARIABLE})"
        raise ConfigError(f"{source.file} is not {where}, and it has no Hugging Face id to load instead.")
    return read_hub(source.hub)


def read_local(source: Source, folder: Path) -> Rows:
    path = folder / source.file
    stored = path.read_bytes()
    rows = list(json_lines(_unzipped(path, source.password) if path.suffix == ".zip" else stored, str(path)))
    caveats = source.companions(rows, folder) if source.companions else ()
    return Rows(tuple(rows), path.name, hashlib.sha256(stored).hexdigest(), caveats)


def json_lines(content: bytes, where: str) -> Iterator[Row]:
    """One object per line. Lines end at \\n alone: texts hold other separators (U+2028) that `splitlines` cuts at."""
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where}:{number} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}:{number} holds {type(row).__name__}, not an object.")
            yield row


def _unzipped(path: Path, password: bytes | None) -> bytes:
    """The one file of the archive, in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = archive.namelist()
            return archive.read(member, pwd=password)
    except (RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None


def read_hub(hub: Hub) -> Rows:
    raws = hub_file_rows(hub, hub.files) if hub.files else hub_table(hub)
    rows = [row for number, raw in enumerate(raws) if (row := hub.rename(raw, number)) is not None]
    if not rows:
        raise ConfigError(f"{hub.id} holds no row of this benchmark; its layout may have changed.")
    if hub.complete:
        hub.complete(rows, hub)
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()
    return Rows(tuple(rows), f"hf:{hub.id}" + (f"/{hub.config}" if hub.config else ""), digest)


def hub_table(hub: Hub) -> Iterable[Mapping[str, Any]]:
    """Rows of the hub's table, read by the `datasets` library."""
    with _explained(hub):
        import datasets

        splits = datasets.load_dataset(hub.id, hub.config)
        return splits[hub.split] if hub.split in splits else _only(splits)


def hub_file_rows(hub: Hub, names: Iterable[str]) -> Iterator[Row]:
    """Objects of JSON Lines files of the hub's repository, as they stand.

    Nested rows that differ in shape do not survive a table, which gives every row the keys of all others.
    """
    for name in names:
        with _explained(hub):
            from huggingface_hub import hf_hub_download

            path = hf_hub_download(hub.id, name, repo_type="dataset")
        yield from json_lines(Path(path).read_bytes(), f"{hub.id}/{name}")


@contextmanager
def _explained(hub: Hub) -> Iterator[None]:
    """Whatever the hub's libraries raise becomes one sentence."""
    try:
        yield
    except ImportError:
        raise ConfigError("Benchmarks from the Hugging Face hub need: pip install 'tah2[data]'.") from None
    except Exception as error:
        gate = " It is gated: accept its terms on the hub and log in." if hub.gated else ""
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        raise ConfigError(
            f"Cannot load {hub.id} from the Hugging Face hub ({type(error).__name__}: {reason}).{gate} "
            f"A local copy is used instead when --data-dir or {DATA_VARIABLE} names its folder."
        ) from None


def _only(splits: Mapping[str, Any]) -> Any:
    """The one split there is: copies of a benchmark disagree whether its name is train or test."""
    if len(splits) != 1:
        raise ValueError(f"its splits are {', '.join(splits)}")
    return next(iter(splits.values()))


def pick(row: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that the row has: copies of a benchmark differ in their column names."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ConfigError(f"A row has none of the fields {', '.join(names)}; it has {', '.join(sorted(row))}.")
