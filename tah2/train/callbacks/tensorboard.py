"""TensorBoard event files in the folder `tensorboard` of the run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from tah2.config.strict import ConfigError
from tah2.train.callbacks.base import Callback, Level, Metrics, RunInfo

FOLDER = "tensorboard"


class TensorBoardLog(Callback):
    """Steps of an earlier attempt that lie beyond the resumed step are hidden by TensorBoard itself."""

    def __init__(self) -> None:
        if not self.installed():
            raise ConfigError(
                "The logger 'tensorboard' needs the tensorboard package: pip install 'tah2[tensorboard]', "
                "or leave it out of the loggers (metrics.jsonl is written in any case)."
            )
        self._writer: Any = None
        self._step = 0

    @staticmethod
    def installed() -> bool:
        return find_spec("tensorboard") is not None

    def on_start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = run.start_step
        purge = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=purge)

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._write("train", step, metrics)

    def on_validation(self, step: int, metrics: Metrics) -> None:
        self._write("validation", step, metrics)
        self._writer.flush()

    def on_message(self, level: Level, text: str) -> None:
        if self._writer is not None:
            self._writer.add_text("messages", f"{level}: {text}", self._step)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, part: str, step: int, metrics: Metrics) -> None:
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(f"{part}/{name}", value, step)
