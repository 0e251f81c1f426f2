"""Who answers in `tah2 chat`: the engine in this process. Pieces of text come with the depth of their token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from tah2.compute.decode import decode_flops
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.engine.detokenize import Detokenizer
from tah2.engine.llm import LLM
from tah2.engine.outputs import RequestOutput
from tah2.engine.params import SamplingParams
from tah2.server.guard import Guard, encode, unused

Message = dict[str, str]


@dataclass(frozen=True)
class Knobs:
    """What one answer is drawn with; None leaves the choice to the checkpoint or the server."""

    max_depth: int | None = None
    exit_threshold: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 512
    seed: int | None = None


class Piece(NamedTuple):
    """What one token added to the text: nothing for half a character."""

    text: str
    depth: int


@dataclass(frozen=True)
class Tally:
    """What an answer cost, as far as it came."""

    depths: list[int]
    flops: int | None
    plain_flops: int | None
    """Of the same tokens, each run once: the backbone without its loop."""
    seconds: float
    finish_reason: str | None


class Answer(Protocol):
    def __iter__(self) -> Iterator[Piece]: ...

    def tally(self) -> Tally: ...


class Speaker(Protocol):
    name: str
    max_depth: int | None
    """The depth ceiling of answers that ask for none, where it is known."""
    exit_threshold: float | None
    """None where no gate decides, or where it is not known."""
    chats: bool
    """Whether there is a chat template; without one the text so far is continued."""

    def answer(self, messages: Sequence[Message], knobs: Knobs) -> Answer: ...


class LocalSpeaker:
    """Answers from an engine in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        if llm.tokenizer is None:
            raise ConfigError(f"{name} has no tokenizer, so it cannot chat; save one into the folder.")
        decoder = llm.model.model
        self.llm, self.name = llm, name
        self._guard = Guard(llm.tokenizer)
        self.max_depth: int | None = decoder.ceiling()
        self.exit_threshold = None if decoder.gate is None else decoder.loop.exit_threshold
        self.chats = bool(getattr(llm.tokenizer, "chat_template", None))

    def answer(self, messages: Sequence[Message], knobs: Knobs) -> LocalAnswer:
        return LocalAnswer(self.llm, self._prompt(messages), self._params(knobs))

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        """What is typed stays text where a template sets control tokens; a continued text is raw, as it is there."""
        tokenizer = self.llm.tokenizer
        if not self.chats:
            return encode(tokenizer, continued(messages))
        cut = unused(messages)
        said = self._guard.turns(messages, cut)
        try:
            rendered = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(f"The chat template cannot render this conversation: {error}.") from None
        return self._guard.encode(rendered, cut)

    def _params(self, knobs: Knobs) -> SamplingParams:
        """Knobs that were not turned follow the checkpoint's generation config."""
        drawn = suggested(getattr(self.llm.model, "generation_config", None))
        given = {name: getattr(knobs, name) for name in ("temperature", "top_p", "top_k")}
        drawn |= {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            **drawn,
            max_tokens=knobs.max_tokens,
            seed=knobs.seed,
            max_depth=knobs.max_depth,
            exit_threshold=knobs.exit_threshold,
        )


def suggested(generation: Any) -> dict[str, Any]:
    """How a checkpoint asks to be sampled, where it says so."""
    if generation is None or not getattr(generation, "do_sample", False):
        return {"temperature": 0.7}
    named = {name: getattr(generation, name, None) for name in ("temperature", "top_p", "top_k")}
    return {name: value for name, value in named.items() if value is not None}


def continued(messages: Sequence[Message]) -> str:
    """One text for a model that knows no turns: what was written follows what was answered."""
    text = ""
    for message in messages:
        separator = "\n" if text and message["role"] != "assistant" and not text.endswith("\n") else ""
        text += separator + message["content"]
    return text


class LocalAnswer:
    """One request of the engine, token by token; leaving the loop early ends it."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        self.llm, self.prompt, self.params = llm, prompt, params
        self._state: RequestOutput | None = None
        self._started = time.monotonic()

    def __iter__(self) -> Iterator[Piece]:
        writer = Detokenizer(self.llm.tokenizer, self.prompt)
        told = 0
        for state in self.llm.stream({"prompt_token_ids": self.prompt}, self.params):
            self._state, completion = state, state.outputs[0]
            if completion.error is not None:
                raise RuntimeError(completion.error)
            for token, depth in zip(completion.token_ids[told:], completion.depths[told:], strict=True):
                before = len(writer.text)
                writer.add(token)
                yield Piece(writer.text[before:], depth)
            told = len(completion.token_ids)
        before = len(writer.text)
        writer.end()
        if self._state is not None and len(writer.text) > before:
            yield Piece(writer.text[before:], self._state.outputs[0].depths[-1])

    def tally(self) -> Tally:
        seconds = time.monotonic() - self._started
        if self._state is None:
            return Tally([], None, None, seconds, None)
        completion, prompt = self._state.outputs[0], self._state.prompt_depths
        backbone, loop = self.llm.model.model.backbone, self.llm.model.model.loop
        depths = completion.depths
        flops = plain = None
        if len(depths) > 1:
            flops = decode_flops(backbone, loop, prompt, depths[1:], self.params.max_depth)
            plain = decode_flops(backbone, LoopConfig("standard"), [1] * len(prompt), [1] * (len(depths) - 1))
        return Tally(depths, flops, plain, seconds, completion.finish_reason)
