"""Completions: prompts as text or token ids, one or many, with their own probabilities where asked (`echo`)."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from msgspec import UNSET

from tah2.engine.params import SamplingParams, StructuredOutputsParams
from tah2.server.async_engine import Ask
from tah2.server.chat import check_depths
from tah2.server.constraints import schema_of, spaced
from tah2.server.errors import invalid
from tah2.server.messages import Delta, PromptReport, Scored
from tah2.server.protocol.answers import Completion, CompletionChoice, CompletionLogprobs
from tah2.server.protocol.requests import CompletionRequest
from tah2.server.reporting import Reporter, Tally, joined
from tah2.server.service import Run, Service
from tah2.server.tokens import Offsets
from tah2.server.transport import DONE, check, event


class Completions:
    """One request, checked and encoded; a mistake in it is an ApiError."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self.service, self.request = service, request
        self.model = service.check_model(request.model)
        self.id, self.created = f"cmpl-{secrets.token_hex(16)}", int(time.time())
        self._check()
        self.prompts = self._prompts()
        params = self._params()
        self.asks = [Ask(ids, params, bool(request.return_continue_probs)) for ids in self.prompts]
        self.reporter = Reporter(service.table, request)
        self.tally = Tally(sum(map(len, self.prompts)))
        self._offsets: dict[int, Offsets] = {}

    @property
    def samples(self) -> int:
        return self.request.n or 1

    def _check(self) -> None:
        request, config = self.request, self.service.config
        request.check_known()
        check(self.samples <= config.max_samples, f"'n' may be at most {config.max_samples}.", "n")
        for name in ("logprobs", "prompt_logprobs", "depth_logprobs"):
            most = config.max_logprobs
            check((getattr(request, name) or 0) <= most, f"{name!r} may be at most {most}.", name)
        check_depths(self.service, request.depth_logprobs)

    def _prompts(self) -> list[list[int]]:
        request, config = self.request, self.service.config
        given: list[Any] = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        if given and isinstance(given[0], int):
            given = [given]
        check(bool(given), "'prompt' is empty; give at least one.", "prompt")
        check(len(given) <= config.max_prompts, f"A request may hold at most {config.max_prompts} prompts.", "prompt")
        special = request.add_special_tokens is not False
        for one in given:
            if isinstance(one, str):
                self.service.renderer.bound(one, "prompt", request.truncate_prompt_tokens is None)
        prompts = [self.service.renderer.text(one, special) if isinstance(one, str) else one for one in given]
        if request.truncate_prompt_tokens is not None:
            prompts = [ids[-request.truncate_prompt_tokens :] for ids in prompts]
        for ids in prompts:
            check(bool(ids), "A prompt is empty; give at least one token.", "prompt")
            size = self.service.facts.vocab_size
            check(max(ids) < size, f"Prompt token ids must lie below {size}.", "prompt")
            self.service.check_length(ids, self._max_tokens, "prompt")
        return prompts

    @property
    def _max_tokens(self) -> int:
        return 16 if self.request.max_tokens is None else self.request.max_tokens

    @property
    def _silent(self) -> bool:
        """No output is wanted; one token runs all the same, because a prompt's end must be drawn from."""
        return self._max_tokens == 0

    def _params(self) -> SamplingParams:
        request = self.request
        asked = [
            count
            for count in (request.prompt_logprobs, request.logprobs if request.echo else None)
            if count is not None
        ]
        return request.sampling_params(
            self.service.defaults,
            max_tokens=max(1, self._max_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=max(asked) if asked else None,
            structured=self._structured(),
        )

    def _structured(self) -> StructuredOutputsParams | None:
        given, schema = self.request.structured(), schema_of(self.request.response_format)
        if given is not None and schema is not None:
            raise invalid("Give one constraint on the output, not several.", "response_format")
        return StructuredOutputsParams(json=spaced(schema)) if schema is not None else given

    async def complete(self, run: Run) -> Completion:
        """The whole answer."""
        news: dict[int, list[Delta]] = {index: [] for index in range(len(self.prompts) * self.samples)}
        async for place, delta in run:
            news[place * self.samples + delta.index].append(delta)
        reports = self._reports(news)
        choices = [
            self._choice(index, joined(deltas), reports[index // self.samples]) for index, deltas in news.items()
        ]
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.tally.usage()
        )  # fmt: skip

    def _reports(self, news: dict[int, list[Delta]]) -> list[PromptReport | None]:
        """Per prompt."""
        return [joined(news[place * self.samples]).prompt for place in range(len(self.prompts))]

    async def stream(self, run: Run) -> AsyncIterator[bytes]:
        """A chunk per piece of news, usage, [DONE]."""
        options = self.request.stream_options
        total = options is not None and bool(options.include_usage)
        always = total and options is not None and bool(options.continuous_usage_stats)
        reports: dict[int, PromptReport] = {}
        waiting: list[tuple[int, Delta]] = []
        async for place, delta in run:
            waiting.append((place, delta))
            if delta.prompt is not None:
                reports[place] = delta.prompt
            # an echo needs the prompt's report, which comes with sample 0
            ready = [pair for pair in waiting if pair[0] in reports]
            waiting = [pair for pair in waiting if pair[0] not in reports]
            for at, news in ready:
                index = at * self.samples + news.index
                choice = self._choice(index, news, reports[at], first=index not in self._offsets)
                if self._says_nothing(choice):
                    continue
                usage = self.tally.usage(final=False) if always else None
                yield event(
                    Completion(
                        id=self.id,
                        created=self.created,
                        model=self.model,
                        choices=[choice],
                        usage=usage if total else UNSET,
                    )
                )
        if total:
            final = self.tally.usage()
            yield event(Completion(id=self.id, created=self.created, model=self.model, choices=[], usage=final))
        yield DONE

    @staticmethod
    def _says_nothing(choice: CompletionChoice) -> bool:
        shown = (choice.logprobs, choice.finish_reason)
        extras = (choice.token_ids, choice.depths, choice.continue_probs, choice.depth_logprobs)
        return not choice.text and shown == (None, None) and all(extra is UNSET for extra in extras)

    def _choice(self, index: int, news: Delta, report: PromptReport | None, first: bool = True) -> CompletionChoice:
        """What `news` adds to choice `index`; the prompt stands before its first piece where it is echoed."""
        request, prompt = self.request, self.prompts[index // self.samples]
        if self._silent:
            news = Delta(news.id, news.index, "", [], [], [], [], [], news.prompt, news.ending)
        self.tally.add(news)
        offsets = self._offsets.setdefault(index, Offsets())
        echoes = bool(request.echo) and first
        about: dict[str, Any] = {}
        if first:
            about["prompt_logprobs"] = self.reporter.prompt_logprobs(report)
            if request.return_token_ids:
                about["prompt_token_ids"] = prompt
            if request.return_depths and report is not None:
                about["prompt_depths"] = report.depths
        return CompletionChoice(
            index=index,
            text=(self._echo(prompt) if echoes else "") + news.text,
            logprobs=self._logprobs(news, report if echoes else None, prompt, offsets),
            finish_reason=self._reason(news),
            stop_reason=None if news.ending is None or self._silent else news.ending.stop,
            **about,
            **self.reporter.extras(news, request.depth_logprobs),
        )

    def _reason(self, news: Delta) -> str | None:
        if news.ending is None:
            return None
        return "length" if self._silent else news.ending.reason

    def _logprobs(
        self, news: Delta, report: PromptReport | None, prompt: list[int], offsets: Offsets
    ) -> CompletionLogprobs | None:
        count = self.request.logprobs
        if count is None:
            return None
        rows: list[list[Scored] | None] = list(news.logprobs or [])
        tokens = list(news.tokens)
        if report is not None and report.logprobs is not None:
            rows, tokens = [*report.logprobs, *rows], [*prompt, *tokens]
        return self.reporter.completion_logprobs(rows, tokens, count, offsets)

    def _echo(self, prompt: list[int]) -> str:
        text: str = self.service.tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
