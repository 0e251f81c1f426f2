"""Fields that chat and completions share, and how they become the engine's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from tah2.engine.params import SamplingParams, StructuredOutputsParams
from tah2.server.errors import invalid, unsupported

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=4096)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
LARGE = 1 << 31

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "bad_words": (None, []),
    "beam_width": (None, 1),
    "best_of": (None, 1),
    "cache_salt": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "early_stopping": (None, False),
    "function_call": (None, "auto", "none"),
    "functions": (None, []),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "structural_tag": (None,),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "typical_p": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
"""Known fields that would change the answer and are not supported, with the values that change nothing."""


class Lenient(BaseModel):
    """Types are exact, unknown fields are kept and ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Lenient):
    """Exactly one constraint."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=10_000)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=10_000)
    grammar: str | None = Field(None, max_length=100_000)
    json_object: bool | None = None


class SamplingFields(Lenient):
    """OpenAI's sampling fields, vLLM's extensions of them, and ours: `exit_threshold`, `max_depth`, `return_depths`."""

    model: Name | None = None
    n: int | None = Field(1, ge=1, le=LARGE)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=1e6)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGE)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[TokenName, Bias] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: list[Token] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(0, ge=0, le=LARGE)
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    allowed_token_ids: list[Token] | None = Field(None, min_length=1)
    prompt_logprobs: int | None = Field(None, ge=0, le=LARGE)
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=LARGE)
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, max_length=10_000)
    guided_choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=10_000)
    guided_grammar: str | None = Field(None, max_length=100_000)
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    user: str | None = None

    exit_threshold: float | None = Field(None, ge=-1e6, le=1e6)
    """Tokens whose continue probability is below stop; None: the checkpoint's."""
    max_depth: int | None = Field(None, ge=1, le=64)
    """Depth ceiling; None: the checkpoint's."""
    return_depths: bool | None = False
    """Give the iterations spent on every token."""
    return_continue_probs: bool | None = False
    """Give the gate's probability after every depth of every token."""
    depth_logprobs: int | None = Field(None, ge=0, le=LARGE)
    """How many of the most probable tokens of every depth to give."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    def check_known(self) -> None:
        """Refuse what this server knows and cannot do."""
        for name, value in (self.model_extra or {}).items():
            neutral = self.unsupported.get(name)
            if neutral is not None and not any(value == kept for kept in neutral):
                raise unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise invalid("'stream_options' needs 'stream': true.", "stream_options")

    def structured(self) -> StructuredOutputsParams | None:
        """The constraint that vLLM's fields ask for."""
        found: dict[str, Any] = {
            "guided_json": ("json", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        given = [pair for pair in found.values() if pair[1] is not None]
        asked = self.structured_outputs
        if asked is not None:
            given += [(name, value) for name in ("regex", "choice", "grammar") if (value := getattr(asked, name))]
            given += [("json", asked.json_)] if asked.json_ is not None else []
            given += [("json_object", True)] if asked.json_object else []
            if not given:
                raise invalid("'structured_outputs' must give one of json, regex, choice, grammar.")
        if len(given) > 1:
            raise invalid("Give one constraint on the output, not several.", "structured_outputs")
        return StructuredOutputsParams(**dict(given)) if given else None

    def sampling_params(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structured: StructuredOutputsParams | None,
    ) -> SamplingParams:
        """The engine's parameters; `defaults` stand for what the request leaves out."""

        def given(name: str, otherwise: Any) -> Any:
            value = getattr(self, name)
            return defaults.get(name, otherwise) if value is None else value

        deep = self.depth_logprobs
        return SamplingParams(
            n=self.n or 1,
            temperature=float(given("temperature", 1.0)),
            top_p=float(given("top_p", 1.0)),
            top_k=given("top_k", 0),
            min_p=float(given("min_p", 0.0)),
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            repetition_penalty=float(given("repetition_penalty", 1.0)),
            seed=None if self.seed is None else self.seed & ((1 << 63) - 1),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=self.stop or None,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            logprobs=logprobs if deep is None else max(deep, logprobs or 0),
            prompt_logprobs=prompt_logprobs,
            depth_logprobs=deep is not None,
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            allowed_token_ids=self.allowed_token_ids,
            structured_outputs=structured,
            skip_special_tokens=self.skip_special_tokens is not False,
            exit_threshold=None if self.exit_threshold is None else float(self.exit_threshold),
            max_depth=self.max_depth,
        )


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
