"""The offline API, with the names that vLLM's users know: `LLM(...).generate(...)` and `.chat(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tah2.config.strict import ConfigError, build
from tah2.engine.config import EngineConfig
from tah2.engine.engine import Engine
from tah2.engine.intake import MaskFactory
from tah2.engine.outputs import RequestOutput
from tah2.engine.parallel import shard
from tah2.engine.params import SamplingParams
from tah2.engine.team import Team
from tah2.engine.weights import Weights
from tah2.model.loop import LoopedDecoder

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""


class LLM:
    """A looped checkpoint and an engine around it.

    `model` is a folder or hub id of a looped checkpoint, or a `LoopedForCausalLM`, which becomes the engine's: it is
    moved, cast and sharded as asked. `device` None: a GPU if there is one, and a model in memory stays where it is.
    Further keywords are fields of `EngineConfig`.

    With `tensor_parallel_size` above 1, every process makes an `LLM` with the same arguments and calls the same
    methods; prompts and parameters are then those of rank 0.
    """

    def __init__(
        self,
        model: str | Path | Any,
        *,
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        weights: Weights | None = None,
        **options: Any,
    ) -> None:
        config = build(EngineConfig, options)
        team = Team.join(config.tensor_parallel_size)
        place = team.place(device)
        if isinstance(model, (str, Path)):
            from tah2.model.checkpoint import load

            tokenizer = _tokenizer(model) if tokenizer is None else tokenizer
            model = load(model, dtype=dtype, device=place if team.alone else "cpu")
        elif dtype is not None:
            model.to(dtype)
        decoder: LoopedDecoder = model.model
        decoder.eval()
        if not team.alone:
            shard(decoder, team)
        if device is not None or not team.alone:
            model.to(place)
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(
            decoder,
            config,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids(model, tokenizer),
            weights=weights,
            mask_factory=_mask_factory(tokenizer, decoder.backbone.vocab_size),
            team=team,
        )
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts."""
        names = self._add(_listed(prompts), sampling_params)
        done = {output.request_id: output for output in self._finish(names)}
        return [done[name] for name in names]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the tokenizer's chat template."""
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer; this LLM was made without one.")
        one = not messages or isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        prompts = [
            self.tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One prompt; yields its state after every step that added to it. Leaving the loop early aborts it."""
        (name,) = self._add([prompt], sampling_params)
        try:
            while True:
                for output in self.engine.step():
                    if output.request_id == name:
                        yield output
                        if output.finished:
                            return
        finally:
            self.engine.abort(name)

    def _add(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[str]:
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts came with {len(each)} sampling_params; give one or one each.")
        prompts, each = self.engine.team.agree((prompts, each))
        names: list[str] = []
        try:
            for prompt, asked in zip(prompts, each, strict=True):
                self._requests += 1
                name = f"llm-{self._requests}"
                self.engine.add_request(name, _content(prompt), asked)
                names.append(name)
        except Exception:
            for name in names:
                self.engine.abort(name)
            raise
        return names

    def _finish(self, names: list[str]) -> Iterator[RequestOutput]:
        left = dict.fromkeys(names)
        try:
            while left:
                for output in self.engine.step(stream=False):
                    left.pop(output.request_id, None)
                    yield output
        finally:
            for name in left:
                self.engine.abort(name)


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an output: the generation config's, else the model's, else the tokenizer's."""
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return [int(token) for token in found] if isinstance(found, (list, tuple)) else [int(found)]
    return []


def _tokenizer(path: str | Path) -> Any:
    """The checkpoint's tokenizer; None if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _mask_factory(tokenizer: Any, vocabulary: int) -> MaskFactory | None:
    if tokenizer is None:
        return None
    from tah2.engine.structured import GrammarMasks

    return GrammarMasks(tokenizer, vocabulary)


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or several: text, a mapping and a list of ids are one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _content(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            content: str | Sequence[int] = prompt[key]
            return content
    raise ConfigError("A prompt given as a mapping needs 'prompt' or 'prompt_token_ids'.")
