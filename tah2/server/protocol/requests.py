"""What the bodies of requests may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tah2.server.protocol.sampling import LARGE, Lenient, ReasoningEffort, SamplingFields, Token

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Part(Lenient):
    """A piece of a message; only texts can be read."""

    type: str
    text: str | None = None


class CalledFunction(Lenient):
    name: str
    arguments: str | dict[str, Any] = "{}"


class CalledTool(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Lenient):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class NamedFunction(Lenient):
    name: FunctionName


class NamedTool(Lenient):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Lenient):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatFields(Lenient):
    """What decides how a conversation becomes a prompt."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False


class ChatRequest(SamplingFields, ChatFields):
    """`POST /v1/chat/completions`."""

    max_tokens: int | None = Field(None, ge=1, le=LARGE)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGE)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=LARGE)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = True
    echo: bool | None = False


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: int | None = Field(16, ge=0, le=LARGE)
    logprobs: int | None = Field(None, ge=0, le=LARGE)
    echo: bool | None = False
    add_special_tokens: bool | None = True
    response_format: ResponseFormat | None = None


class TokenizeRequest(Lenient):
    """Either `prompt`, or `messages` and what belongs to them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = None
    """By default for a prompt and not for messages, whose template writes them."""
    return_token_strs: bool | None = False

    def conversation(self) -> ChatFields:
        """The part that a chat has too."""
        assert self.messages is not None
        return ChatFields(
            messages=self.messages,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
        )


class DetokenizeRequest(Lenient):
    model: str | None = None
    tokens: list[Token]
    skip_special_tokens: bool | None = False
