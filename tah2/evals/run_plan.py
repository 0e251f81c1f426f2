"""What a run is asked to do: its configuration, and the list of samples that follows from it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tah2.config.strict import ConfigError, plain
from tah2.evals.records import sample_seed
from tah2.evals.task import Decoding, LoadedTask, Problem, Task

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EvalConfig:
    """None means the task's own default (or the checkpoint's, for what a checkpoint knows)."""

    out: Path
    tasks: tuple[str, ...]
    model: str | None = None
    """A looped checkpoint: folder or hub id. With `endpoint` it is optional and serves tokenizer and accounting."""
    n: int | None = None
    """Samples per problem; greedy tasks always take one."""
    data_dir: Path | None = None
    limit: int | None = None
    """The first so many problems of each task."""
    seed: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_depth: int | None = None
    exit_threshold: float | None = None
    chat: Literal["auto", "on", "off"] = "auto"
    """Through the tokenizer's chat template, or as plain text; "auto": where there is a template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server, with its `/v1`."""
    model_name: str | None = None
    """What the server calls the model; None: the one that it lists."""
    in_flight: int = 32
    """Requests that a server gets at the same time."""
    workers: int = 1
    """Processes that share the samples, each with an engine of its own."""
    ray: bool = False
    """The workers run on a Ray cluster instead of this machine."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Keywords of `LLM`: device, dtype, and the fields of `EngineConfig`."""
    label: str | None = None
    """Name of the run in tables and figures; None: the model's."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("Name at least one task, as in '--tasks gsm8k'.")
        if len(set(self.tasks)) != len(self.tasks):
            raise ConfigError("A task is named twice; name each once.")
        if self.model is None and self.endpoint is None:
            raise ConfigError("Name a model, or a server with '--endpoint'.")
        for name in ("n", "limit", "max_tokens", "max_depth", "workers", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        if self.endpoint is not None and (self.workers > 1 or self.ray):
            raise ConfigError("A server is asked from one process; leave out '--workers' and '--ray'.")


@dataclass(frozen=True)
class Sample:
    """One response to generate."""

    task: str
    problem: Problem
    repeat: int
    seed: int
    decoding: Decoding
    stops: tuple[str, ...]
    """For a model without a chat template."""
    multi_turn: bool = False


@dataclass(frozen=True)
class TaskPlan:
    """One task of a run: which problems, how often, and how they are decoded."""

    loaded: LoadedTask
    problems: tuple[Problem, ...]
    repeats: int
    decoding: Decoding

    @classmethod
    def of(cls, loaded: LoadedTask, config: EvalConfig) -> TaskPlan:
        task = loaded.task
        given = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        decoding = dataclasses.replace(task.decoding, **{k: v for k, v in given.items() if v is not None})
        greedy = decoding.temperature == 0
        return cls(loaded, loaded.problems[: config.limit], 1 if greedy else config.n or task.repeats, decoding)

    @property
    def task(self) -> Task:
        return self.loaded.task

    def settings(self) -> dict[str, Any]:
        """What the records of this task depend on."""
        sampling = {name: value for name, value in plain(self.decoding).items() if name != "exit_threshold"}
        names = json_digest([problem.id for problem in self.problems])
        data = self.loaded.provenance()
        return {
            "n": self.repeats,
            "decoding": sampling,
            "problems": {"count": len(self.problems), "ids": names},
            "version": data["version"],
            "data": {"origin": data["origin"], "sha256": data["sha256"]},
        }

    def samples(self, seed: int) -> Iterator[Sample]:
        """Repeats of a problem follow each other, so that they share its prompt in the engine's cache."""
        task = self.task
        for problem in self.problems:
            asked = problem if task.multi_turn else dataclasses.replace(problem, data={})
            for repeat in range(self.repeats):
                mixed = sample_seed(seed, task.name, problem.id, repeat)
                yield Sample(
                    task.name, asked, repeat, mixed, self.decoding, tuple(task.text_stop), multi_turn=task.multi_turn
                )


def json_digest(values: Any) -> str:
    import json

    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def load_plans(config: EvalConfig) -> list[TaskPlan]:
    from tah2.evals.tasks import task_named

    return [TaskPlan.of(task_named(name).load(config.data_dir), config) for name in config.tasks]


class Prompts:
    """Problems as token ids, and token ids as text, through one tokenizer."""

    def __init__(self, tokenizer: Any, chat: Literal["auto", "on", "off"], template: Mapping[str, Any]) -> None:
        if tokenizer is None:
            raise ConfigError("The model has no tokenizer; tasks are texts and need one.")
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat == "on" and not has_template:
            raise ConfigError("The tokenizer has no chat template; leave out '--chat on'.")
        self.tokenizer = tokenizer
        self.chat = has_template and chat != "off"
        self.template = dict(template)

    def settings(self) -> dict[str, Any]:
        template = str(self.tokenizer.chat_template) if self.chat else ""
        digest = hashlib.sha256(template.encode()).hexdigest()[:16] if self.chat else None
        return {"chat": self.chat, "template": digest, "template_kwargs": self.template}

    def ids(self, problem: Problem) -> list[int]:
        return self._templated(problem.messages) if self.chat else self._encoded(problem.text)

    def of_conversation(self, messages: Messages, tools: Messages) -> list[int]:
        """A conversation with tools up to the point where the assistant answers; as text where the template knows no
        tools, and would leave them out without a word."""
        if self.chat and "tools" in str(self.tokenizer.chat_template):
            return self._templated(messages, tools)
        from tah2.evals.episode import as_text

        text = as_text([dict(message) for message in messages], [dict(tool) for tool in tools])
        return self._templated([{"role": "user", "content": text}]) if self.chat else self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]

    def _templated(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            **self.template,
        )
        return [int(token) for token in ids]

    def stops(self, sample: Sample) -> tuple[str, ...]:
        return () if self.chat else sample.stops

    def text(self, token_ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        return response_text(self.tokenizer, token_ids, stops)


def response_text(tokenizer: Any, token_ids: Sequence[int], stops: Sequence[str] = ()) -> str:
    """A response as graders see it: without special tokens, and cut before the first stop string."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
