"""`tah2 eval`: generate what is missing of a run, one record per sample, in a folder that explains itself.

    OUT/run.json                what this is a run of (`manifest`)
    OUT/samples/TASK.jsonl      one record per sample (`records`), in the order in which they finished

Nothing is lost when the process is killed: the same command goes on where it stopped, and since every sample has a
seed of its own, the records are those of an uninterrupted run.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tah2.config.strict import ConfigError, plain
from tah2.evals.manifest import SAMPLES, fingerprint, join_run
from tah2.evals.records import ERROR, RecordFile, SampleRecord
from tah2.evals.run_plan import EvalConfig, Prompts, Sample, TaskPlan, load_plans
from tah2.evals.run_progress import RunProgress

HOPELESS = 8
"""Samples that fail before any has succeeded, after which a run gives up."""


class Backend(Protocol):
    """Whatever makes records of samples."""

    def records(self, samples: Iterable[Sample]) -> Iterator[SampleRecord]: ...


@dataclass(frozen=True)
class RunSummary:
    out: Path
    total: int
    generated: int
    failed: int
    """Samples whose last try ended in an error; the same command tries them again."""


def samples_path(out: Path, task: str) -> Path:
    return out / SAMPLES / f"{task}.jsonl"


def evaluate(config: EvalConfig, backend: Backend | None = None) -> RunSummary:
    """Generate the samples of `config` that its folder lacks; `backend` None: what the configuration names."""
    plans = load_plans(config)
    model = ModelFacts.of(config)
    settings = run_settings(config, model, plans)
    with locked(config.out):
        join_run(config.out, config.label or model.label, settings, model=config.model, endpoint=config.endpoint)
        missing, total = _missing(config, plans)
        if not missing:
            return RunSummary(config.out, total, 0, 0)
        backend = backend or _backend(config, model)
        return _generate(config, backend, missing, total)


def _missing(config: EvalConfig, plans: list[TaskPlan]) -> tuple[list[Sample], int]:
    missing, total = [], 0
    for plan in plans:
        done = RecordFile(samples_path(config.out, plan.task.name)).keys()
        for sample in plan.samples(config.seed):
            total += 1
            if (sample.problem.id, sample.repeat) not in done:
                missing.append(sample)
    return missing, total


def _generate(config: EvalConfig, backend: Backend, missing: list[Sample], total: int) -> RunSummary:
    made = failed = 0
    with ExitStack() as stack:
        names = dict.fromkeys(sample.task for sample in missing)
        files = {name: stack.enter_context(RecordFile(samples_path(config.out, name))) for name in names}
        progress = stack.enter_context(RunProgress(total, total - len(missing)))
        for record in backend.records(missing):
            files[record.task].append(record)
            progress.add(record)
            made += 1
            failed += record.finish_reason == ERROR
            if failed == made == min(HOPELESS, len(missing)):
                raise ConfigError(f"Every sample fails: {record.extra.get('error', 'no reason is known')}")
    return RunSummary(config.out, total, made, failed)


def _backend(config: EvalConfig, model: ModelFacts) -> Backend:
    if config.endpoint is not None:
        from tah2.evals.run_endpoint import EndpointRun

        prompts = (
            None if model.tokenizer is None else Prompts(model.tokenizer, config.chat, config.chat_template_kwargs)
        )
        return EndpointRun(config, prompts, model.ceiling, model.flops())
    if config.workers > 1 or config.ray:
        from tah2.evals.run_workers import WorkersRun

        return WorkersRun(config)
    return engine_run(config)


def engine_run(config: EvalConfig) -> Any:
    """The engine of this process, loaded."""
    from tah2.engine.llm import LLM
    from tah2.evals.run_engine import EngineRun

    options = dict(config.engine)
    if isinstance(options.get("dtype"), str):
        options["dtype"] = _dtype(options["dtype"])
    llm = LLM(config.model or "", **options)
    prompts = Prompts(llm.tokenizer, config.chat, config.chat_template_kwargs)
    return EngineRun(llm, prompts, config.max_depth, config.exit_threshold)


def _dtype(name: str) -> Any:
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ConfigError(f"dtype must be one of {', '.join(dtypes)}, not {name!r}.")
    return dtypes[name]


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without its weights."""

    label: str
    settings: dict[str, Any]
    tokenizer: Any = None
    ceiling: int | None = None
    loop: Any = None
    backbone: Any = None

    @classmethod
    def of(cls, config: EvalConfig) -> ModelFacts:
        name = {} if config.endpoint is None else {"served_as": config.model_name, "server": True}
        if config.model is None:
            return cls(config.model_name or "server", {**name, "max_depth": config.max_depth})
        from transformers import AutoConfig, AutoTokenizer

        from tah2.model.folder import check_folder
        from tah2.model.hf_config import LoopedConfig
        from tah2.model.kinds import kind_of

        folder = Path(config.model)
        if folder.is_dir() and config.endpoint is None:
            check_folder(folder)
        try:
            found = AutoConfig.from_pretrained(config.model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"Cannot open the model {config.model}: {str(error).splitlines()[0]}") from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.model)
        except (OSError, ValueError):
            tokenizer = None
        label = folder.name
        weights = fingerprint(folder) if folder.is_dir() else getattr(found, "_commit_hash", None)
        settings = {**name, "weights": weights, "dtype": _dtype_name(config, found)}
        if not isinstance(found, LoopedConfig):
            if config.endpoint is None:
                raise ConfigError(f"{config.model} is no looped checkpoint; `tah2 convert` makes one of it.")
            return cls(label, settings, tokenizer)
        loop, backbone = found.loop_config, found.backbone_config
        kind = kind_of(loop)
        ceiling = kind.ceiling(loop, config.max_depth)
        threshold = loop.exit_threshold if config.exit_threshold is None else config.exit_threshold
        shape = {"loop": plain(loop), "backbone": plain(backbone), "max_depth": ceiling}
        gate = {"exit_threshold": threshold if kind.gate is not None else None}
        return cls(label, {**settings, **shape, **gate}, tokenizer, ceiling, loop, backbone)

    def prompts(self, config: EvalConfig) -> Prompts | None:
        """None for a server whose tokenizer is not known here."""
        if self.tokenizer is None and config.endpoint is not None:
            return None
        return Prompts(self.tokenizer, config.chat, config.chat_template_kwargs)

    def flops(self) -> Any:
        """The price of its tokens, where its shape is known."""
        if self.loop is None:
            return None
        from tah2.evals.flops import FlopsModel

        return FlopsModel(self.backbone, self.loop, self.ceiling)


def _dtype_name(config: EvalConfig, found: Any) -> str:
    stored = str(getattr(found, "dtype", None) or "float32").removeprefix("torch.")
    return str(config.engine.get("dtype") or stored)


def run_settings(config: EvalConfig, model: ModelFacts, plans: list[TaskPlan]) -> Mapping[str, Any]:
    """Everything that decides the records."""
    prompt: dict[str, Any] = {"chat": config.chat, "template_kwargs": dict(config.chat_template_kwargs)}
    if (prompts := model.prompts(config)) is not None:
        prompt = prompts.settings()
    sizes = {name: config.engine[name] for name in ("max_model_len", "weight_storage") if name in config.engine}
    return {
        "model": model.settings,
        "prompt": prompt,
        "seed": config.seed,
        "engine": sizes,
        "tasks": {plan.task.name: plan.settings() for plan in plans},
    }


@contextmanager
def locked(folder: Path, what: str = "eval") -> Iterator[None]:
    """Keep a second process from doing the same in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{what}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process is writing to {folder}; wait for it or choose another folder."
            ) from None
        yield
