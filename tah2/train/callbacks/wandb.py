"""Weights & Biases, online or offline (`WANDB_MODE=offline`, later `wandb sync`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.train.callbacks.base import Callback, Level, Metrics, RunInfo

ID_FILE = "wandb_run_id"


class WandbLog(Callback):
    """A resumed run continues under its old id; steps that the tracker already has are not sent twice."""

    def __init__(self) -> None:
        if find_spec("wandb") is None:
            raise ConfigError(
                "The logger 'wandb' needs the wandb package: pip install 'tah2[wandb]', or leave it out of the loggers."
            )
        self._run: Any = None

    def on_start(self, run: RunInfo) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=_run_id(run),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._log("train", step, metrics)

    def on_validation(self, step: int, metrics: Metrics) -> None:
        self._log("validation", step, metrics)

    def on_message(self, level: Level, text: str) -> None:
        if self._run is not None and level != "info":
            self._run.alert(title=f"tah2: {level}", text=text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update(dict(summary))
            self._run.finish()

    def _log(self, part: str, step: int, metrics: Metrics) -> None:
        """Steps must not fall: the tracker drops what a resumed run repeats, which equals what it has."""
        self._run.log({f"{part}/{name}": value for name, value in metrics.items()}, step=step)


def _run_id(run: RunInfo) -> str:
    """The id kept in the run's folder; a new one for a run that starts anew."""
    path: Path = run.folder / ID_FILE
    if run.start_step and path.exists():
        return path.read_text(encoding="utf-8").strip()
    name = secrets.token_hex(4)
    run.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(name + "\n", encoding="utf-8")
    return name
