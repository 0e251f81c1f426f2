"""Samples through the engine: a window of requests that is refilled as they finish, so memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tah2.config.strict import ConfigError
from tah2.engine.llm import LLM
from tah2.engine.outputs import RequestOutput
from tah2.engine.params import SamplingParams
from tah2.evals.records import ERROR, SampleRecord, depth_counts
from tah2.evals.run_conversation import Call, Conversation
from tah2.evals.run_plan import Prompts, Sample


class EngineRun:
    """Generates samples with one `LLM`; `max_depth` and `exit_threshold` None mean the checkpoint's."""

    def __init__(
        self, llm: LLM, prompts: Prompts, max_depth: int | None = None, exit_threshold: float | None = None
    ) -> None:
        self.llm, self.prompts = llm, prompts
        self.max_depth, self.exit_threshold = max_depth, exit_threshold
        self.ceiling = llm.engine.decoder.ceiling(max_depth)
        self.window = llm.engine.config.max_num_seqs
        """Requests in flight: what runs at once. None waits in a queue, so a response's time is its own."""
        self._running: dict[str, Conversation] = {}
        self._asked = 0

    def records(self, samples: Iterable[Sample]) -> Iterator[SampleRecord]:
        """One record per sample, in the order in which they finish; `samples` is read as places come free."""
        waiting = iter(samples)
        try:
            while True:
                while len(self._running) < self.window and (sample := next(waiting, None)) is not None:
                    yield from self.start(sample)
                if not self._running:
                    return
                yield from self.step()
        finally:
            self.abort()

    def start(self, sample: Sample) -> Iterator[SampleRecord]:
        """Add a sample; its record comes at once if it cannot run."""
        conversation = Conversation(sample)
        try:
            self._ask(conversation)
        except ConfigError as error:
            conversation.refuse(str(error))
            yield conversation.record()

    def step(self) -> Iterator[SampleRecord]:
        """One pass of the engine; records of the samples that it finished."""
        for output in self.llm.engine.step(stream=False):
            conversation = self._running.pop(output.request_id, None)
            if conversation is None:
                continue
            call = self._call(output, conversation.sample)
            try:
                if conversation.answer(call):
                    self._ask(conversation)
                    continue
            except ConfigError as error:
                conversation.refuse(str(error))
            yield conversation.record()

    @property
    def busy(self) -> int:
        return len(self._running)

    def abort(self) -> None:
        for name, conversation in self._running.items():
            self.llm.engine.abort(name)
            conversation.close()
        self._running.clear()

    def _ask(self, conversation: Conversation) -> None:
        sample, asked = conversation.sample, conversation.asked
        if asked.messages is None:
            ids = self.prompts.ids(sample.problem)
        else:
            ids = self.prompts.of_conversation(asked.messages, asked.tools or ())
        self._asked += 1
        name = f"eval-{self._asked}"
        self.llm.engine.add_request(name, ids, self._params(sample))
        self._running[name] = conversation

    def _params(self, sample: Sample) -> SamplingParams:
        decoding = sample.decoding
        stops = self.prompts.stops(sample)
        return SamplingParams(
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            max_tokens=decoding.max_tokens,
            seed=sample.seed,
            stop=list(stops) or None,
            detokenize=bool(stops),
            max_depth=self.max_depth,
            exit_threshold=self.exit_threshold,
        )

    def _call(self, output: RequestOutput, sample: Sample) -> Call:
        (completion,) = output.outputs
        metrics = completion.metrics
        reason = completion.finish_reason or ERROR
        extra: dict[str, Any] = {} if completion.error is None else {"error": completion.error}
        return Call(
            text=self.prompts.text(completion.token_ids, self.prompts.stops(sample)),
            finish_reason=reason,
            prompt_tokens=len(output.prompt_token_ids),
            prompt_depth_counts=depth_counts(output.prompt_depths, self.ceiling),
            token_ids=completion.token_ids,
            depths=completion.depths,
            decode_flops=completion.decode_flops,
            seconds=_since(metrics.arrival_time, metrics.finished_time),
            first_token_seconds=_since(metrics.arrival_time, metrics.first_token_time),
            extra=extra,
        )


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
