"""Teachers behind one seam: requests in, answers out, many at once, in whatever order they finish.

`answers(requests)` reads `requests` only as places come free, and asks it again after handing out an answer even
where it had nothing before: an answer may be what makes the next request possible.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tah2.config.strict import ConfigError, build
from tah2.data.conversation import Message
from tah2.distill.config import EngineTeacher, SamplingConfig, TeacherConfig
from tah2.evals.endpoint import Answer, Choice, EndpointConfig, EndpointRequest, Key, ask_all


class Teacher(Protocol):
    def request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingConfig, seed: int
    ) -> EndpointRequest: ...

    def answers(self, requests: Iterable[tuple[Key, EndpointRequest]]) -> Iterator[tuple[Key, Answer]]: ...


class Server:
    """Any OpenAI-compatible server."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config

    def request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingConfig, seed: int
    ) -> EndpointRequest:
        options = drawn(sampling, seed)
        if sampling.template_arguments:
            options["chat_template_kwargs"] = sampling.template_arguments
        return EndpointRequest(messages=over_the_wire(messages), tools=tools, options=options)

    def answers(self, requests: Iterable[tuple[Key, EndpointRequest]]) -> Iterator[tuple[Key, Answer]]:
        return ask_all(self.config, requests)


class LocalEngine:
    """The engine of this package, in this process."""

    def __init__(self, config: EngineTeacher) -> None:
        from tah2.engine.llm import LLM

        self.config, self.llm = config, LLM(config.model, **config.options)
        if self.llm.tokenizer is None or not self.llm.tokenizer.chat_template:
            raise ConfigError(f"{config.model!r} has no tokenizer with a chat template, so it cannot answer prompts.")

    def request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingConfig, seed: int
    ) -> EndpointRequest:
        ids = self.llm.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **sampling.template_arguments,
        )
        return EndpointRequest(prompt=ids, options=drawn(sampling, seed))

    def answers(self, requests: Iterable[tuple[Key, EndpointRequest]]) -> Iterator[tuple[Key, Answer]]:
        engine, source = self.llm.engine, iter(requests)
        running: dict[str, tuple[Key, float]] = {}
        count = 0
        try:
            while True:
                while len(running) < self.config.in_flight and (entry := next(source, None)) is not None:
                    key, request = entry
                    name = f"distill-{count}"
                    count += 1
                    refusal = self._add(name, request)
                    if refusal is not None:
                        yield key, refusal
                        continue
                    running[name] = key, time.perf_counter()
                if not running:
                    return
                for output in engine.step(stream=False):
                    key, started = running.pop(output.request_id)
                    yield key, self._answer(output, time.perf_counter() - started)
        finally:
            for name in running:
                engine.abort(name)

    def _add(self, name: str, request: EndpointRequest) -> Answer | None:
        from tah2.engine.params import SamplingParams

        params = build(SamplingParams, request.options, "sampling")
        try:
            self.llm.engine.add_request(name, request.prompt or (), params)
        except ValueError as error:
            return Answer(error=f"The engine refuses it: {error}", status=400)
        return None

    def _answer(self, output: Any, seconds: float) -> Answer:
        said = output.outputs[0]
        if said.finish_reason not in ("stop", "length"):
            return Answer(error=f"The engine ended with {said.finish_reason!r}: {said.error or 'no reason given'}")
        choice = Choice(said.text, said.finish_reason, token_ids=tuple(said.token_ids), depths=tuple(said.depths))
        return Answer(
            (choice,),
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(said.token_ids),
            model=self.config.model,
            seconds=seconds,
        )


class Nobody:
    """Where the data answer for themselves: no request is ever made."""

    def request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingConfig, seed: int
    ) -> EndpointRequest:
        raise AssertionError("recorded answers are not asked for")

    def answers(self, requests: Iterable[tuple[Key, EndpointRequest]]) -> Iterator[tuple[Key, Answer]]:
        for key, _ in requests:
            yield key, Answer(error="nobody was asked")


def open_teacher(config: TeacherConfig) -> Teacher:
    if config.endpoint is not None:
        return Server(config.endpoint)
    return Nobody() if config.engine is None else LocalEngine(config.engine)


def drawn(sampling: SamplingConfig, seed: int) -> dict[str, Any]:
    """The options of a request, by the names that servers and `SamplingParams` share; `extra` has the last word.

    OpenAI's own API knows neither `top_k` nor `min_p`: at 0, which turns them off, they are not sent.
    """
    options = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
    }
    return {name: value for name, value in (options | sampling.extra).items() if value is not None}


def over_the_wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as OpenAI's format has them: arguments of calls as JSON strings, every call and result with an id."""
    sent: list[dict[str, Any]] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        message = dict(message)
        if message.get("tool_calls"):
            calls = [_wire_call(call, f"call_{number}_{i}") for i, call in enumerate(message["tool_calls"])]
            message["tool_calls"], waiting = calls, [call["id"] for call in calls]
        if message["role"] == "tool" and "tool_call_id" not in message:
            message["tool_call_id"] = waiting.pop(0) if waiting else f"call_{number}"
        sent.append(message)
    return sent


def _wire_call(call: Mapping[str, Any], fallback: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.get("id", fallback), "type": "function", "function": {**function, "arguments": text}}
