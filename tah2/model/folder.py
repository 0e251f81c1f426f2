"""Checkpoint folders that are whole or absent: `config.json` leaves first and arrives last.

Everything is written into a hidden subfolder and moved into place file by file. Without `config.json` no loader,
ours or Hugging Face's, takes a folder for a checkpoint, so a writer killed at any moment leaves either the old
checkpoint, the new one, or something that is visibly neither.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from tah2.config.strict import ConfigError

PREFIX = "model."
"""Name of the decoder inside `LoopedForCausalLM`; also what Hugging Face backbones put before their tensors."""
MARKER = "config.json"
UNFINISHED = ".unfinished"


@contextmanager
def whole_folder(target: str | Path) -> Iterator[Path]:
    """Yield a folder to write into; on success its files replace those of the same role in `target`."""
    target = Path(target)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a folder to save the checkpoint in.")
    staging = target / UNFINISHED
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _publish(staging, target)


def _publish(staging: Path, target: Path) -> None:
    if not (staging / MARKER).is_file():
        raise ValueError(f"Nothing was saved to {target}: the checkpoint has no {MARKER}.")
    for file in staging.rglob("*"):
        if file.is_file():
            _flush(file)
    (target / MARKER).unlink(missing_ok=True)
    for stale in [*target.glob("*.safetensors"), *target.glob("*.safetensors.index.json")]:
        stale.unlink()
    for entry in sorted(staging.iterdir(), key=lambda path: path.name == MARKER):
        destination = target / entry.name
        if destination.is_dir():
            shutil.rmtree(destination)
        os.replace(entry, destination)
    _flush(target)
    staging.rmdir()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Refuse a local folder that is not a complete looped checkpoint, in one sentence."""
    if not (folder / MARKER).is_file():
        half = " (a save into it was interrupted)" if (folder / UNFINISHED).exists() else ""
        raise ConfigError(f"{folder} holds no {MARKER}{half}: it is not a complete checkpoint.")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds no *.safetensors weights; pickled weights are refused.")


def refuse_mismatch(missing: Iterable[str], unexpected: Iterable[str], misshapen: Iterable[str] = ()) -> None:
    """Raise one sentence that names the tensors by which weights and config differ."""
    complaints = [
        f"{what} tensors: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        for what, names in (
            ("missing", sorted(set(missing) - set(misshapen))),
            ("unexpected", sorted(unexpected)),
            ("misshapen", sorted(misshapen)),
        )
        if names
    ]
    if complaints:
        raise ConfigError(f"The weights do not fit the config; {'; '.join(complaints)}.")


def add_notes(folder: Path) -> None:
    """Leave what a reader without this package needs to see: code stubs with a clear message, and a README."""
    notes = resources.files("tah2.model") / "notes"
    for name in ("configuration_looped.py", "modeling_looped.py", "README.md"):
        (folder / name).write_text((notes / name).read_text(encoding="utf-8"), encoding="utf-8")
    config = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    config["auto_map"] = {
        "AutoConfig": "configuration_looped.LoopedConfig",
        "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
    }
    (folder / MARKER).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
