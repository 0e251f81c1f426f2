"""`run.json`: what a folder of samples is a run of.

`settings` decides the records, so a rerun must agree with all of it; more tasks may join. `sessions` says when, and
with which program versions, samples were added.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, build

FILE_NAME = "run.json"
SAMPLES = "samples"
FORMAT = 1
PACKAGES = ("tah2", "torch", "transformers", "numpy")
_SHOWN = 4
_BLOCKS, _BLOCK = 256, 1 << 12


@dataclass
class RunManifest:
    label: str
    """What tables and figures call this run; may change."""
    settings: dict[str, Any]
    """`model`, `prompt`, `seed` and, per task, `tasks.NAME`: plain values only."""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    format: int = FORMAT

    @classmethod
    def read(cls, folder: str | Path) -> RunManifest:
        path = Path(folder) / FILE_NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**values)
        except OSError:
            raise ConfigError(f"{folder} holds no {FILE_NAME}; name a folder that `tah2 eval` has written.") from None
        except (ValueError, TypeError):
            raise ConfigError(f"{path} is not the description of a run; move it away or mend it.") from None
        if found.format != FORMAT:
            raise ConfigError(f"{path} has format {found.format}, this version reads {FORMAT}.")
        return found

    def write(self, folder: str | Path) -> None:
        write_whole(Path(folder) / FILE_NAME, json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        return dict(self.settings["tasks"])

    @property
    def model(self) -> dict[str, Any]:
        return dict(self.settings["model"])

    @property
    def loop(self) -> LoopConfig | None:
        loop = self.model.get("loop")
        return None if loop is None else build(LoopConfig, loop)

    @property
    def backbone(self) -> BackboneConfig | None:
        backbone = self.model.get("backbone")
        return None if backbone is None else build(BackboneConfig, backbone)


def join_run(folder: Path, label: str, settings: Mapping[str, Any], **notes: Any) -> RunManifest:
    """Begin a run in `folder`, or go on with the one that is there if it has the same settings; else refuse.

    `notes` are about this session alone.
    """
    asked = json.loads(json.dumps(settings))
    if (folder / FILE_NAME).exists():
        found = RunManifest.read(folder)
        _refuse_other(folder, found.settings, asked)
        found.settings["tasks"] |= asked["tasks"]
    elif (folder / SAMPLES).exists() and any((folder / SAMPLES).iterdir()):
        raise ConfigError(f"{folder} holds samples but no {FILE_NAME} that explains them; choose another folder.")
    else:
        found = RunManifest(label, asked)
    found.label = label
    found.sessions.append(session() | notes)
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder)
    return found


def _refuse_other(folder: Path, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    common = {name: task for name, task in stored["tasks"].items() if name in asked["tasks"]}
    kept = {name: asked["tasks"][name] for name in common}
    found = differences({**stored, "tasks": common}, {**asked, "tasks": kept})
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"{folder} holds a run with other settings: {'; '.join(found[:_SHOWN])}{more}. "
            "Choose another folder, or ask for the same again."
        )


def differences(stored: Any, asked: Any, where: str = "") -> list[str]:
    """`name is A there, but B is asked for`, for every value that is not the same."""
    if isinstance(stored, Mapping) and isinstance(asked, Mapping):
        names = sorted(stored.keys() | asked.keys())
        lists = (
            differences(stored.get(name), asked.get(name), f"{where}.{name}" if where else str(name)) for name in names
        )
        return [line for each in lists for line in each]
    return [] if stored == asked else [f"{where} is {_short(stored)} there, but {_short(asked)} is asked for"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def session() -> dict[str, Any]:
    """When, and with which versions, this process adds to a run."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "packages": versions(PACKAGES),
    }


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed versions by package name; None where a package is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@cache
def commit() -> str | None:
    """The commit of the checkout that this package runs from, marked where files have changed since; None elsewhere."""
    here = Path(__file__).resolve().parent
    try:
        name, changed = (
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return name.strip() + (" with changes" if changed.strip() else "")


def fingerprint(folder: Path) -> str:
    """A short hash of a checkpoint: its config, and of every weight file the size and blocks spread over it."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for block in range(min(_BLOCKS, size // _BLOCK + 1)):
                file.seek(block * max(_BLOCK, size // _BLOCKS))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def write_whole(path: Path, text: str) -> None:
    """Replace `path` in one move."""
    partial = path.with_name(f"{path.name}.new")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
