"""What one request asks for: vLLM's sampling names, plus the two knobs of a looped model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tah2.config.strict import ConfigError

GREEDY = 1e-5
"""Temperatures below this value mean the most probable token."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one constraint on the output's text."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A grammar in Lark syntax."""

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) + self.json_object != 1:
            raise ConfigError("structured_outputs takes exactly one of json, json_object, regex, choice and grammar.")


@dataclass(frozen=True)
class SamplingParams:
    """All of temperature, top_p, top_k and min_p act on the mixed distribution."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: the engine draws one."""
    max_tokens: int | None = 16
    """None: as many as the model's length and the pool allow."""
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """How many of the most probable tokens to report per output token, beside the chosen one."""
    prompt_logprobs: int | None = None
    depth_logprobs: bool = False
    """Report the log-probabilities of every executed depth too (`logprobs` says how many)."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    exit_threshold: float | None = None
    """None: the checkpoint's."""
    max_depth: int | None = None
    """None: the checkpoint's."""

    def __post_init__(self) -> None:
        _at_least("n", self.n, 1)
        _at_least("temperature", self.temperature, 0)
        _at_least("top_k", self.top_k, -1)
        _at_least("min_tokens", self.min_tokens, 0)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie above 0 and at most at 1, not {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must lie between 0 and 1, not {self.min_p}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name} must lie between -2 and 2, not {getattr(self, name)}.")
        if not self.repetition_penalty > 0 or not math.isfinite(self.repetition_penalty):
            raise ConfigError(f"repetition_penalty must be a positive number, not {self.repetition_penalty}.")
        for name in ("max_tokens", "max_depth"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
        if self.exit_threshold is not None and math.isnan(self.exit_threshold):
            raise ConfigError("exit_threshold must be a number.")
        if "" in self.stops:
            raise ConfigError("A stop string must not be empty.")
        if self.stops and not self.detokenize:
            raise ConfigError("Stop strings need detokenize=True.")
        if self.depth_logprobs and self.logprobs is None:
            raise ConfigError("depth_logprobs needs logprobs: say how many tokens to report.")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids and counts that the model's vocabulary does not have."""
        named = [*self.logit_bias, *(self.allowed_token_ids or ()), *self.stop_token_ids]
        if any(not 0 <= token < size for token in named):
            raise ConfigError(f"Token ids must lie between 0 and {size - 1}.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ConfigError("allowed_token_ids must name at least one token.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > size:
                raise ConfigError(f"{name} must be at most the vocabulary's {size} tokens.")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number of at least {least}, not {value}.")
