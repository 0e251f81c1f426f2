"""What a server is told at its start: the model and engine of its worker, the door's limits, how it is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tah2.config.strict import ConfigError


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker process loads."""

    model: str
    """Folder or hub id of a looped checkpoint."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; None: the checkpoint's, but float32 on a CPU."""
    device: str | None = None
    """None: a GPU if there is one."""
    threads: int | None = None
    """Threads of PyTorch; None: its own choice."""
    worker_start_seconds: float = 1800.0
    """How long loading may take."""


@dataclass(frozen=True)
class ServerConfig:
    """The front: nothing here changes an answer."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; the first is the one that answers carry. Empty: the model's path."""
    api_keys: tuple[str, ...] = ()
    """Empty: everybody may ask."""
    max_queue: int = 512
    """Samples that may wait beyond those that run; more are refused with 429."""
    max_body_bytes: int = 32 << 20
    max_samples: int = 128
    """Largest `n` of one request."""
    max_prompts: int = 2048
    """Most prompts of one request."""
    max_logprobs: int = 20
    request_timeout: float = 3600.0
    """Seconds from the first byte of a request to the last one of its answer."""
    body_timeout: float = 30.0
    """Seconds within which a request's body must have arrived."""
    stall_timeout: float = 60.0
    """Seconds for which a client may take nothing of a stream that waits for it."""
    drain_timeout: float = 60.0
    """Seconds that running requests get to finish after SIGTERM."""
    allow_origins: tuple[str, ...] = ()
    """Web pages of other origins that may call the API (CORS)."""
    allow_hosts: tuple[str, ...] = ()
    """Names beside this machine's own that requests may call it by, where it listens on a loopback address."""
    log_content: bool = False
    """Write prompts and answers to the log."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    reasoning: Literal["auto", "on", "off"] = "auto"
    """Split <think> blocks from the answer; auto: where the chat template knows them."""
    generation_config: Literal["auto", "off"] = "auto"
    """auto: sampling parameters that a request leaves out are those that the checkpoint recommends."""
    metrics_prefix: str = "tah2"
    """Of the metrics' names, before a colon; "vllm" makes dashboards for vLLM fit."""
    chat_template: str | None = None
    """Instead of the tokenizer's."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_logprobs", "drain_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}.")
        sizes, times = (
            ("max_body_bytes", "max_samples", "max_prompts"),
            ("request_timeout", "body_timeout", "stall_timeout"),
        )
        for name in sizes + times:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}.")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must lie between 0 and 65535, not {self.port}.")
        if any(not key for key in self.api_keys):
            raise ConfigError("An API key must not be empty.")
