"""Chat completions: a conversation becomes a request to the engine, its news an answer or a stream of chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET

from tah2.server.async_engine import Ask
from tah2.server.constraints import constraint
from tah2.server.errors import unsupported
from tah2.server.marks import CLOSE
from tah2.server.messages import Delta, PromptReport
from tah2.server.protocol.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FunctionCall,
    PartialFunction,
    PartialToolCall,
    ToolCall,
    Usage,
)
from tah2.server.protocol.requests import ChatRequest, NamedTool
from tah2.server.reasoning import ReasoningSplitter
from tah2.server.render import Prompt
from tah2.server.reporting import Reporter, Tally, joined
from tah2.server.service import Run, Service
from tah2.server.toolcalls import Argued, Called, Event, Said, ToolCallReader
from tah2.server.transport import DONE, check, event


@dataclass
class Spoken:
    """A piece of a sample's text, taken apart."""

    reasoning: str = ""
    content: str = ""
    calls: list[PartialToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def extend(self, more: Spoken) -> None:
        self.reasoning += more.reasoning
        self.content += more.content
        for call in more.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.argue(call.index, str(call.function.arguments))
            else:
                self.calls.append(call)

    def argue(self, index: int, text: str) -> None:
        """A piece of the arguments of call `index`."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(PartialToolCall(index, PartialFunction(arguments="")))
        function = self.calls[-1].function
        function.arguments = f"{function.arguments}{text}"


class Voice:
    """Takes one sample's text apart into reasoning, answer and tool calls."""

    def __init__(self, splitter: ReasoningSplitter | None, reader: ToolCallReader | None) -> None:
        self.splitter, self.reader = splitter, reader

    @property
    def thinking(self) -> bool:
        return self.splitter is not None and self.splitter.thinking

    @property
    def calls(self) -> int:
        return 0 if self.reader is None else self.reader.calls

    def feed(self, text: str, last: bool) -> Spoken:
        spoken = Spoken()
        reasoning, answer = ("", text) if self.splitter is None else self.splitter.feed(text)
        if last and self.splitter is not None:
            rest = self.splitter.finish()
            reasoning, answer = reasoning + rest[0], answer + rest[1]
        spoken.reasoning = reasoning
        if self.reader is None:
            spoken.content = answer
            return spoken
        events = self.reader.feed(answer) + (self.reader.finish() if last else [])
        for each in events:
            self._hear(each, spoken)
        return spoken

    @staticmethod
    def _hear(said: Event, spoken: Spoken) -> None:
        if isinstance(said, Said):
            spoken.content += said.text
        elif isinstance(said, Called):
            function = PartialFunction(said.name, "")
            spoken.calls.append(PartialToolCall(said.index, function, f"call_{secrets.token_hex(12)}", "function"))
        elif isinstance(said, Argued):
            spoken.argue(said.index, said.text)


class Chat:
    """One request, checked and rendered; a mistake in it is an ApiError."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self.service, self.request = service, request
        self.model = service.check_model(request.model)
        self.id, self.created = f"chatcmpl-{secrets.token_hex(16)}", int(time.time())
        self._check()
        self._uses_tools = bool(request.tools) and request.tool_choice != "none"
        self.prompt = self._render()
        self.ask = self._ask()
        self.reporter = Reporter(service.table, request)
        self.voices = [self._voice() for _ in range(self.ask.params.n)]
        self.tally = Tally(len(self.ask.prompt))

    def _check(self) -> None:
        request, config = self.request, self.service.config
        request.check_known()
        check((request.n or 1) <= config.max_samples, f"'n' may be at most {config.max_samples}.", "n")
        if request.echo:
            raise unsupported("echo", "is not supported in chats; use /v1/completions")
        top = request.top_logprobs
        check(top is None or bool(request.logprobs), "'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        for name in ("top_logprobs", "prompt_logprobs", "depth_logprobs"):
            most = config.max_logprobs
            check((getattr(request, name) or 0) <= most, f"{name!r} may be at most {most}.", name)
        check_depths(self.service, request.depth_logprobs)

    def _render(self) -> Prompt:
        request = self.request
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []] if self._uses_tools else []
        prompt = self.service.renderer.chat(request, tools, self._effort())
        if request.truncate_prompt_tokens is not None:
            prompt = Prompt(prompt.ids[-request.truncate_prompt_tokens :], prompt.text)
        return prompt

    def _effort(self) -> dict[str, Any]:
        """`reasoning_effort` as the template understands it."""
        effort, source = self.request.reasoning_effort, self.service.renderer.source
        if effort is None:
            return {}
        if "reasoning_effort" in source:
            return {"reasoning_effort": effort}
        if "enable_thinking" in source:
            return {"enable_thinking": effort != "none"}
        raise unsupported("reasoning_effort", "has no meaning for this model's chat template")

    def _ask(self) -> Ask:
        request, service = self.request, self.service
        limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        most: int | None = getattr(request, limit)
        service.check_length(self.prompt.ids, most, "messages", limit)
        params = request.sampling_params(
            service.defaults,
            max_tokens=most,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            structured=constraint(request, self.prompt, self._thinks, service.added_tokens),
        )
        if self._uses_tools and request.parallel_tool_calls is False and params.structured_outputs is None:
            params = replace(params, stop=[*params.stops, CLOSE])
        return Ask(self.prompt.ids, params, bool(request.return_continue_probs))

    @property
    def _thinks(self) -> bool:
        return self.service.reasons and not self.request.continue_final_message

    def _voice(self) -> Voice:
        splitter = ReasoningSplitter(self.prompt.thinks) if self._thinks else None
        most = 1 if self.request.parallel_tool_calls is False else None
        return Voice(splitter, ToolCallReader(most) if self._uses_tools else None)

    async def complete(self, run: Run) -> ChatCompletion:
        """The whole answer."""
        news: list[list[Delta]] = [[] for _ in self.voices]
        async for _, delta in run:
            news[delta.index].append(delta)
        choices = [self._choice(deltas) for deltas in news]
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.tally.usage(),
            **self._about_prompt(joined(news[0]).prompt),
        )

    def _choice(self, deltas: list[Delta]) -> ChatChoice:
        sample, spoken = joined(deltas), Spoken()
        voice = self.voices[sample.index]
        for delta in deltas:
            self.tally.add(delta, voice.thinking)
            spoken.extend(voice.feed(delta.text, last=delta.ending is not None))
        calls = [
            ToolCall(str(c.id), FunctionCall(str(c.function.name), str(c.function.arguments))) for c in spoken.calls
        ]
        thoughts = spoken.reasoning or None if self.request.include_reasoning is not False else None
        message = AssistantMessage(
            "assistant",
            spoken.content if spoken.content or not (calls or thoughts) else None,
            reasoning=thoughts,
            reasoning_content=thoughts,
            tool_calls=calls or UNSET,
        )
        assert sample.ending is not None
        return ChatChoice(
            index=sample.index,
            message=message,
            logprobs=self._logprobs(sample),
            finish_reason=self._reason(sample, voice),
            stop_reason=sample.ending.stop,
            **self.reporter.extras(sample, self.request.depth_logprobs),
        )

    async def stream(self, run: Run) -> AsyncIterator[bytes]:
        """Role, deltas, finish, usage, [DONE]."""
        options = self.request.stream_options
        total = options is not None and bool(options.include_usage)
        always = total and options is not None and bool(options.continuous_usage_stats)
        for index in range(len(self.voices)):
            yield self._chunk([ChatChunkChoice(index=index, delta=ChatDelta("assistant", ""))], total, always)
        async for _, delta in run:
            voice = self.voices[delta.index]
            self.tally.add(delta, voice.thinking)
            spoken = voice.feed(delta.text, last=delta.ending is not None)
            if spoken.reasoning and (spoken.content or spoken.calls):  # clients read one of the two in a chunk
                thought, spoken.reasoning = spoken.reasoning, ""
                if self.request.include_reasoning is not False:
                    said = ChatDelta(reasoning=thought, reasoning_content=thought)
                    yield self._chunk([ChatChunkChoice(index=delta.index, delta=said)], total, always)
            choice = self._partial(delta, spoken)
            if choice is not None:
                yield self._chunk([choice], total, always, delta.prompt)
            if delta.ending is not None:
                end = ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(),
                    finish_reason=self._reason(delta, voice),
                    stop_reason=delta.ending.stop,
                )
                yield self._chunk([end], total, always)
        if total:
            final = self.tally.usage()
            yield event(ChatChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=final))
        yield DONE

    def _partial(self, delta: Delta, spoken: Spoken) -> ChatChunkChoice | None:
        """What a delta adds; None if nobody wants to hear of it yet."""
        said = ChatDelta()
        if spoken.reasoning and self.request.include_reasoning is not False:
            said.reasoning = said.reasoning_content = spoken.reasoning
        if spoken.content:
            said.content = spoken.content
        if spoken.calls:
            said.tool_calls = spoken.calls
        extras = self.reporter.extras(delta, self.request.depth_logprobs) if delta.tokens else {}
        logprobs = self._logprobs(delta) if delta.tokens else None
        if not spoken and not extras and logprobs is None:
            return None
        return ChatChunkChoice(index=delta.index, delta=said, logprobs=logprobs, **extras)

    def _chunk(
        self, choices: list[ChatChunkChoice], total: bool, always: bool, prompt: PromptReport | None = None
    ) -> bytes:
        usage: Usage | None = self.tally.usage(final=False) if always else None
        return event(
            ChatChunk(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage if total else UNSET,
                **self._about_prompt(prompt),
            )
        )

    def _about_prompt(self, report: PromptReport | None) -> dict[str, Any]:
        if report is None:
            return {}
        found: dict[str, Any] = {"prompt_logprobs": self.reporter.prompt_logprobs(report)}
        if self.request.return_token_ids:
            found["prompt_token_ids"] = list(self.ask.prompt)
        if self.request.return_depths:
            found["prompt_depths"] = report.depths
        return found

    def _logprobs(self, delta: Delta) -> Any:
        if not self.request.logprobs or delta.logprobs is None:
            return None
        return self.reporter.chat_logprobs(delta.logprobs, self.request.top_logprobs or 0)

    def _reason(self, delta: Delta, voice: Voice) -> str:
        assert delta.ending is not None
        reason = delta.ending.reason
        called = voice.calls > 0 and not isinstance(self.request.tool_choice, NamedTool)
        return "tool_calls" if reason == "stop" and called else reason


def check_depths(service: Service, depth_logprobs: int | None) -> None:
    """Refuse predictions that the model does not make."""
    facts = service.facts
    if depth_logprobs is not None and not facts.depth_logprobs:
        raise unsupported("depth_logprobs", f"needs a loop that mixes its depths; {facts.loop!r} does not")
