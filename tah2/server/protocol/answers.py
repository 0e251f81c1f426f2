"""What answers hold, in the order in which it is written; fields of ours come after OpenAI's and vLLM's."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class CachedTokens(Struct):
    cached_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputDetails
    mean_depth: float | None
    """Iterations per output token."""
    decode_flops: int | None
    """Exact, of all output tokens but each sample's first; null while running unless `return_continue_probs` is set."""
    plain_decode_flops: int | None
    """What the same tokens would have cost at depth 1."""


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class Extras(Struct, kw_only=True):
    """Of a choice, where the request asked for them: one entry per output token that the choice or chunk holds."""

    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    depths: list[int] | UnsetType = UNSET
    """Iterations spent to predict each token."""
    continue_probs: list[list[float]] | UnsetType = UNSET
    """Per token, the gate's probabilities after depths 1, 2, ..."""
    depth_logprobs: list[list[TokenLogprob]] | UnsetType = UNSET
    """Per token and executed depth."""


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class AssistantMessage(Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Extras, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatAnswer(Struct, kw_only=True):
    """What a whole answer and its chunks have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_depths: list[int] | UnsetType = UNSET


class ChatCompletion(ChatAnswer, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class PartialFunction(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class PartialToolCall(Struct):
    index: int
    function: PartialFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[PartialToolCall] | UnsetType = UNSET


class ChatChunkChoice(Extras, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(ChatAnswer, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(Extras, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_depths: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ModelCard(Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "tah2"
    root: str
    parent: str | None = None
    max_model_len: int
    loop: str
    max_depth: int
    exit_threshold: float
    gated: bool
    """The model decides per token how deep to go; otherwise every token runs `max_depth` iterations."""
    depth_logprobs: bool
    """Depths have predictions of their own."""
    parameters: int


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class Tokens(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(Struct):
    prompt: str


class TokenizerInfo(Struct, kw_only=True):
    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Problem(Struct):
    error: ErrorBody
