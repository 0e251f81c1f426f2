"""Checkpoints that a run resumes from: whole or absent, independent of the number of ranks, bit for bit exact.

A checkpoint is a folder `step-000123` on storage that every rank sees:

    __0_0.distcp ... .metadata   weights, optimizer state and random states, by torch.distributed.checkpoint
    state.json                   step, place in the data, counters, metrics, the configuration
    complete.json                written last: every other file with its size

It is written as `step-000123.partial` and renamed when all is on disk, so a run killed at any moment leaves the
checkpoints before it. Tensors are named by parameter, not by rank or optimizer index. Loading unpickles the index of
the checkpoint: resume only from folders that your own runs wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from tah2.config.strict import ConfigError, build, plain
from tah2.data.order import LoaderState
from tah2.model.folder import refuse_mismatch
from tah2.train.parallel import World, settle
from tah2.train.randomness import random_states, restore_random_states

MARKER, STATE, PARTIAL = "complete.json", "state.json", ".partial"
_MODEL, _OPTIMIZER, _RANDOM = "model/", "optimizer/", "random/"


@dataclass
class TrainingState:
    """All that a run needs to go on; `CheckpointStore.load` fills it in place."""

    decoder: nn.Module
    optimizer: torch.optim.Optimizer
    config: Mapping[str, Any] = field(default_factory=dict)
    """What must be the same when the run goes on; JSON values and dataclasses, nested as you like."""
    step: int = 0
    """Optimizer steps done; the schedule of the learning rate is a function of it."""
    loader: LoaderState = field(default_factory=LoaderState)
    counters: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    """JSON values"""


class CheckpointStore:
    """The checkpoints of one run. Every rank makes the same calls in the same order."""

    def __init__(self, folder: str | Path, keep: int = 2, world: World | None = None) -> None:
        if keep < 1:
            raise ConfigError(f"Keep at least one checkpoint, not {keep}.")
        self.folder, self.keep, self.world = Path(folder), keep, world or World()
        # Background saving talks beside training, so it needs a group of its own, on CPU.
        self._group = None if self.world.group is None else dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._saved: Path | None = None
        if self._group is None:  # what we ask for with `no_dist`
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    def save(self, state: TrainingState, asynchronous: bool = True) -> Path:
        """Write `step-...` from a copy taken now; the next `wait`, `save` or `close` reports a failure."""
        self.wait()
        final = self.folder / f"step-{state.step:06d}"
        if final == self._saved:
            return final
        partial = final.with_name(final.name + PARTIAL)
        if self.world.is_main:
            for stale in self.folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(stale)
            partial.mkdir(parents=True, exist_ok=True)  # a quicker rank's writer may have made it by now
            _write_json(partial / STATE, self._described(state))
        upload = async_save(
            {**_tensors(state), **self._random_tensors()},
            storage_writer=FileSystemWriter(partial),
            process_group=self._group,
            async_stager=self._stager,
            no_dist=self._group is None,
        )
        self._pending = self._thread.submit(self._finish, cast("Future[Any]", upload), partial, final)
        self._saved = final
        if not asynchronous:
            self.wait()
        return final

    def wait(self) -> None:
        """Until the last save is complete on every rank."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error: str | None = None
        try:
            pending.result()
        except (Exception, CheckpointException) as failure:
            error = _reason(failure)
        errors = self._gathered(error)
        if any(errors):
            path, self._saved = self._saved, None
            first = next(text for text in errors if text)
            raise RuntimeError(f"{path} could not be saved ({first}); the checkpoints before it are untouched.")

    def close(self) -> None:
        self.wait()
        self._release()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._pending is not None:  # other ranks may be gone: finish the save, ask nobody
            with suppress(Exception, CheckpointException):
                self._pending.result()
            self._release()

    def latest(self) -> Path | None:
        """The checkpoint that was completed last; one that is not whole is passed over with a warning."""
        found = next(reversed(self._whole(warn=True)), None) if self.world.is_main else None
        return self._from_main(found)

    def check(self, path: str | Path, config: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another configuration, before anything is loaded for it."""
        described = json.loads((Path(path) / STATE).read_text(encoding="utf-8"))
        refuse_other_config(Path(path), described["config"], config)

    def load(self, path: str | Path, state: TrainingState) -> None:
        """Fill `state` from the checkpoint, on any number of ranks.

        Random states return where the number of ranks is the one that saved. Learning rate and the like are not
        state: they stay as the optimizer has them.
        """
        path = Path(path)
        complaint = _complaint(path)
        if complaint:
            raise ConfigError(f"{path} {complaint}; resume from another checkpoint or start a new run.")
        described = json.loads((path / STATE).read_text(encoding="utf-8"))
        refuse_other_config(path, described["config"], state.config)
        try:
            self._load_tensors(path, state, described["world_size"])
        except ConfigError:
            raise
        except (Exception, CheckpointException) as error:
            raise ConfigError(f"{path} cannot be read ({_reason(error)}); resume from another checkpoint.") from error
        state.step = described["step"]
        state.loader = build(LoaderState, described["loader"], "loader")
        state.counters, state.metrics = described["counters"], described["metrics"]
        self._saved = path if path.parent == self.folder else None

    def _load_tensors(self, path: Path, state: TrainingState, saved_ranks: int) -> None:
        known = FileSystemReader(path).read_metadata().state_dict_metadata
        settle(state.decoder)
        weights = {_MODEL + name: tensor for name, tensor in state.decoder.state_dict().items()}
        saved = {name for name in known if name.startswith(_MODEL)}
        refuse_mismatch(weights.keys() - saved, saved - weights.keys())
        moments = _optimizer_templates(state, known)
        own = f"{_RANDOM}{self.world.rank}/"
        random = {name: _empty(known[name]) for name in known if name.startswith(own)}
        random = random if saved_ranks == self.world.world_size else {}
        load_tensors(
            {**weights, **moments, **random},
            storage_reader=FileSystemReader(path),
            process_group=self._group,
            no_dist=self._group is None,
        )
        _fill_optimizer(state, moments)
        if random:
            restore_random_states({name.removeprefix(own): value for name, value in random.items()}, self.world.device)

    def _described(self, state: TrainingState) -> dict[str, Any]:
        return {
            "step": state.step,
            "loader": plain(state.loader),
            "counters": state.counters,
            "metrics": state.metrics,
            "world_size": self.world.world_size,
            "torch": torch.__version__,
            "config": _json(state.config),
        }

    def _random_tensors(self) -> dict[str, Tensor]:
        states = random_states(self.world.device)
        return {f"{_RANDOM}{self.world.rank}/{name}": value for name, value in states.items()}

    def _finish(self, upload: Future[Any], partial: Path, final: Path) -> None:
        """In the background: the upload ends on rank 0 once every rank has written its files."""
        upload.result()
        if not self.world.is_main:
            return
        order = 1 + max((_order(path) for path in self._whole()), default=0)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        _write_json(partial / MARKER, {"order": order, "files": sizes})
        _flush(partial)
        _discard(final)
        partial.rename(final)
        _flush(self.folder)
        for old in self._whole()[: -self.keep]:
            _discard(old)

    def _whole(self, warn: bool = False) -> list[Path]:
        """Complete checkpoints in the order of their completion."""
        whole = []
        for path in self.folder.glob("step-*"):
            if path.suffix == PARTIAL:
                continue
            complaint = _complaint(path)
            if complaint is None:
                whole.append(path)
            elif warn:
                warnings.warn(f"{path} {complaint}; passing it over.", stacklevel=3)
        return sorted(whole, key=_order)

    def _gathered(self, value: str | None) -> list[str | None]:
        values: list[str | None] = [value] * self.world.world_size
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _from_main(self, path: Path | None) -> Path | None:
        shared = [path]
        if self._group is not None:
            dist.broadcast_object_list(shared, 0, group=self._group)
        return shared[0]

    def _release(self) -> None:
        self._thread.shutdown()
        self._stager.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


def _tensors(state: TrainingState) -> dict[str, Tensor]:
    """Weights and optimizer state by parameter name."""
    settle(state.decoder)
    tensors = {_MODEL + name: tensor for name, tensor in state.decoder.state_dict().items()}
    for _, name, parameter in _optimized(state):
        for key, value in state.optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}/{key}"] = value
    return tensors


def _optimized(state: TrainingState) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Every optimized parameter: its index in the optimizer's own state, its name, itself."""
    names = {parameter: name for name, parameter in state.decoder.named_parameters()}
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        yield index, names[parameter], parameter


def _optimizer_templates(state: TrainingState, known: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors to load optimizer state into: sharded like the parameter where shaped like it, else whole."""
    templates = {}
    parameters = {name: parameter for _, name, parameter in _optimized(state)}
    for full_name, saved in known.items():
        if not full_name.startswith(_OPTIMIZER):
            continue
        name = full_name.removeprefix(_OPTIMIZER).rpartition("/")[0]
        parameter = parameters.get(name)
        if parameter is None:
            raise ConfigError(f"The checkpoint optimizes {name}, which this run does not: train the same parameters.")
        like = isinstance(parameter, DTensor) and saved.size == parameter.shape
        templates[full_name] = torch.zeros_like(parameter, dtype=saved.properties.dtype) if like else _empty(saved)
    return templates


def _fill_optimizer(state: TrainingState, moments: Mapping[str, Tensor]) -> None:
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, value in moments.items():
        name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition("/")
        by_name.setdefault(name, {})[key] = value
    filled = {index: by_name[name] for index, name, _ in _optimized(state) if name in by_name}
    state.optimizer.load_state_dict({"state": filled, "param_groups": state.optimizer.state_dict()["param_groups"]})


def _empty(saved: Any) -> Tensor:
    assert isinstance(saved, TensorStorageMetadata)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _complaint(path: Path) -> str | None:
    """Why the folder is no whole checkpoint, as the end of a sentence, or None."""
    if not path.is_dir():
        return "does not exist"
    if not (path / MARKER).is_file():
        return f"holds no complete checkpoint: {MARKER} is missing"
    try:
        sizes = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        for name, size in sizes.items():
            actual = (path / name).stat().st_size
            if actual != size:
                return f"is damaged: {name} has {actual} bytes, not {size}"
    except FileNotFoundError as error:
        return f"is damaged: {Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError):
        return f"is damaged: its {MARKER} cannot be read"
    return None


def _order(path: Path) -> int:
    return int(json.loads((path / MARKER).read_text(encoding="utf-8"))["order"])


def refuse_other_config(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """One sentence that names what differs between the configuration of the run at `path` and this one."""
    then, here = dict(_leaves(saved)), dict(_leaves(_json(now)))
    names = [name for name in {**then, **here} if then.get(name, _ABSENT) != here.get(name, _ABSENT)]
    if names:
        shown = [f"{name} was {then.get(name, _ABSENT)}, is {here.get(name, _ABSENT)}" for name in names[:5]]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(
            f"{path} belongs to another configuration ({'; '.join(shown)}{more}): "
            "restore these values, or start a new run in another folder."
        )


def _reason(error: BaseException) -> str:
    """One line; of a failure on several ranks the first."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


_ABSENT = "absent"


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and JSON texts of everything below a mapping."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _leaves(entry, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, json.dumps(value)


def _json(config: Mapping[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps(plain(config))))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(path: Path) -> None:
    """Remove a checkpoint; its marker goes first, so that half of it is never taken for one."""
    if path.exists():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
