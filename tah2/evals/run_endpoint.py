"""Samples through any OpenAI-compatible server, many in flight, with what the server tells about tokens and depths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from tah2.config.strict import ConfigError
from tah2.evals.endpoint import Answer, Choice, EndpointClient, EndpointConfig, EndpointRequest
from tah2.evals.records import ERROR, SampleRecord, depth_counts
from tah2.evals.run_conversation import LENGTH, Call, Conversation, failed
from tah2.evals.run_plan import EvalConfig, Prompts, Sample

FINISHED = {"stop": "stop", "tool_calls": "stop", "length": LENGTH}
"""Other words of a server ("content_filter") are errors."""

REFUSED = 400
"""What servers answer to a prompt that has grown too long, among other mistakes."""


class EndpointRun:
    """Generates samples with a server. `prompts` (of a local tokenizer) is optional: with it, plain-text prompts and
    texts of token ids are ours; without it everything goes through the server's chat route."""

    def __init__(self, config: EvalConfig, prompts: Prompts | None, ceiling: int | None, flops: Any = None) -> None:
        self.config, self.prompts, self.ceiling, self.flops = config, prompts, ceiling, flops
        self.server = EndpointConfig(config.endpoint or "", config.model_name or "", in_flight=config.in_flight)

    def records(self, samples: Iterable[Sample]) -> Iterator[SampleRecord]:
        """One record per sample as they finish, from a loop of its own; leaving early cancels what is in flight."""
        loop = asyncio.new_event_loop()
        stream = self._stream(iter(samples))
        try:
            while (record := loop.run_until_complete(anext(stream, None))) is not None:
                yield record
        finally:
            loop.run_until_complete(stream.aclose())  # type: ignore[attr-defined]
            loop.close()

    async def _stream(self, waiting: Iterator[Sample]) -> AsyncIterator[SampleRecord]:
        running: set[asyncio.Task[SampleRecord]] = set()
        async with EndpointClient(self.server) as client:
            try:
                while True:
                    while len(running) < self.config.in_flight and (sample := next(waiting, None)) is not None:
                        running.add(asyncio.create_task(self._record(client, sample)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        yield task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _record(self, client: EndpointClient, sample: Sample) -> SampleRecord:
        """An episode's own work (running tool calls) happens in a thread, so that other requests go on."""
        conversation = await asyncio.to_thread(Conversation, sample)
        try:
            while True:
                answer = await client.answer(self._request(conversation))
                if answer.status == REFUSED:
                    await asyncio.to_thread(conversation.refuse, answer.error or "The server refused the request.")
                    break
                if not await asyncio.to_thread(conversation.answer, self._call(answer, sample)):
                    break
        finally:
            conversation.close()
        return conversation.record()

    def _request(self, conversation: Conversation) -> EndpointRequest:
        sample, asked = conversation.sample, conversation.asked
        options = self._options(sample)
        if asked.messages is not None:
            return EndpointRequest(messages=asked.messages, tools=asked.tools or (), options=options)
        if self._plain:
            stops = {"stop": list(sample.stops)} if sample.stops else {}
            return EndpointRequest(prompt=sample.problem.text, options={**options, **stops})
        return EndpointRequest(messages=sample.problem.messages, options=options)

    @property
    def _plain(self) -> bool:
        """Prompts are texts, because the user says so or the model is known to have no chat template."""
        return self.config.chat == "off" or (self.prompts is not None and not self.prompts.chat)

    def _stops(self, sample: Sample) -> tuple[str, ...]:
        return sample.stops if self._plain else ()

    def _options(self, sample: Sample) -> dict[str, Any]:
        config, decoding = self.config, sample.decoding
        options: dict[str, Any] = {
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "max_tokens": decoding.max_tokens,
            "seed": sample.seed,
            "return_token_ids": True,
            "return_depths": True,
        }
        if decoding.top_k > 0:
            options["top_k"] = decoding.top_k
        for name in ("max_depth", "exit_threshold"):
            if getattr(config, name) is not None:
                options[name] = getattr(config, name)
        if config.chat_template_kwargs:
            options["chat_template_kwargs"] = dict(config.chat_template_kwargs)
        return options

    def _call(self, answer: Answer, sample: Sample) -> Call:
        if answer.error is not None or not answer.choices:
            return failed(answer.error or "The server sent no choice.")
        choice = answer.choices[0]
        depths, tokens = list(choice.depths or ()), list(choice.token_ids or ())
        extra: dict[str, Any] = {} if choice.token_ids is not None else {"completion_tokens": answer.completion_tokens}
        if choice.tool_calls:
            extra["tool_calls"] = list(choice.tool_calls)
        counts = self._counts(answer)
        known = self.flops is not None and depths and counts
        if tokens and self.prompts is not None:
            text = self.prompts.text(tokens, self._stops(sample))
        else:
            text = _whole_text(choice)
        return Call(
            text=text,
            finish_reason={"stop": "stop", "length": LENGTH, "tool_calls": "stop"}.get(
                choice.finish_reason or "", ERROR
            ),
            prompt_tokens=answer.prompt_tokens or 0,
            prompt_depth_counts=counts,
            token_ids=tokens,
            depths=depths,
            decode_flops=int(self.flops.of_beginnings(counts, depths)[-1]) if known else None,
            seconds=round(answer.seconds, 6),
            extra=extra,
        )

    def _counts(self, answer: Answer) -> list[int]:
        if answer.prompt_depths is None:
            return []
        ceiling = self.ceiling or max(answer.prompt_depths, default=1)
        if max(answer.prompt_depths, default=1) > ceiling:
            raise ConfigError(
                "The server runs deeper than the model named here says: name the server's own checkpoint."
            )
        return depth_counts(answer.prompt_depths, ceiling)


def _whole_text(choice: Choice) -> str:
    """The response as the model wrote it, with the thinking and the tool calls that the server has split off."""
    thinking = f"<think>\n{choice.reasoning}\n</think>\n\n" if choice.reasoning else ""
    calls = [call["function"] for call in choice.tool_calls if "function" in call]
    form = '<tool_call>\n{{"name": {}, "arguments": {}}}\n</tool_call>'
    written = [form.format(json.dumps(call["name"]), call.get("arguments") or "{}") for call in calls]
    return "\n".join([thinking + choice.text, *written] if thinking or choice.text else written)
