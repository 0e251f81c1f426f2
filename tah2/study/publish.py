"""What of a finished study is kept in a repository: the report, `summary.json`, and the records that they come from.

`report/` and `summary.json` are copied. `records.tar.xz` holds `study.json` and, of every unit, who it is, its losses,
its training curve, every response and its verdict, and what analyses found of its tokens; no weights. `open_records`
reads results from it.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tah2.config.strict import ConfigError
from tah2.study.layout import (
    GRADES,
    RUNTIME,
    SAMPLES,
    STUDY,
    SUMMARY,
    TRAIN,
    UNIT,
    UNITS,
    VALIDATE,
    Results,
    load_results,
)

RECORDS = "records.tar.xz"
KEPT = (UNIT, VALIDATE, GRADES, f"{TRAIN}/summary.json", f"{TRAIN}/metrics.jsonl", f"{SAMPLES}/*.jsonl")
"""Files of a unit."""
FOUND = ("gains.json", "alignment.json")
"""Its analyses that claims are about."""


def publish(root: Path, out: Path) -> Path:
    """Copy the report and pack the records of the study at `root`; returns `out`."""
    if not (root / SUMMARY).is_file() or not (root / "report").is_dir():
        raise ConfigError(f"{root} has no summary and report yet: let the study finish before it is published.")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "report", ignore_errors=True)
    shutil.copytree(root / "report", out / "report")
    shutil.copyfile(root / SUMMARY, out / SUMMARY)
    partial = out / f"{RECORDS}.partial"
    with tarfile.open(partial, "w:xz") as archive:
        for path in kept_files(root):
            archive.add(path, str(path.relative_to(root)), filter=_anonymous)
    partial.replace(out / RECORDS)
    return out


def kept_files(root: Path) -> Iterator[Path]:
    """Those of the units that `study.json` names, in a fixed order."""
    yield from (root / name for name in (STUDY, RUNTIME, SUMMARY) if (root / name).is_file())
    for unit in load_results(root).all_units:
        for pattern in KEPT:
            yield from sorted((root / UNITS / unit.info.id).glob(pattern))
        yield from (path for name in FOUND if (path := root / "analyses" / unit.info.id / name).is_file())


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without whose file it was, and when."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


@contextmanager
def open_records(archive: Path) -> Iterator[Results]:
    """The results in a published archive, unpacked for as long as they are read."""
    with TemporaryDirectory(prefix="tah2-records-") as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        yield load_results(folder)
