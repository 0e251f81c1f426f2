"""JSON schemas, regular expressions and grammars as `LogitsMask`, through llguidance (an optional extra)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tah2.config.strict import ConfigError
from tah2.engine.params import StructuredOutputsParams


@dataclass(frozen=True)
class GrammarMask:
    """One state of a grammar; the matcher inside is never advanced, only copied."""

    matcher: Any
    vocabulary: int

    @property
    def finished(self) -> bool:
        return bool(self.matcher.is_stopped())

    def allowed(self) -> Tensor:
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self.vocabulary].astype(np.bool_))

    def after(self, token: int) -> GrammarMask:
        matcher = self.matcher.deep_copy()
        if not matcher.consume_token(token):
            raise ValueError(f"Token {token} does not fit the grammar: {matcher.get_error()}")
        return GrammarMask(matcher, self.vocabulary)


class GrammarMasks:
    """Makes grammar states for one tokenizer; the tokenizer is read on first use."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._read: Any = None

    def __call__(self, wanted: StructuredOutputsParams) -> GrammarMask:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ConfigError("Structured outputs need llguidance; install the structured extra.") from None
        if self._read is None:
            self._read = from_tokenizer(self.tokenizer, n_vocab=self.vocabulary)
        try:
            grammar = _grammar(LLMatcher, wanted)
        except ValueError as error:
            raise ConfigError(f"The structured output cannot be compiled: {error}") from None
        complaint = LLMatcher.validate_grammar(grammar, self._read)
        if complaint:
            raise ConfigError(f"The structured output cannot be compiled: {' '.join(complaint.split())}")
        return GrammarMask(LLMatcher(self._read, grammar), self.vocabulary)


def _grammar(matcher: Any, wanted: StructuredOutputsParams) -> str:
    if wanted.json_object:
        grammar = matcher.grammar_from_json_schema({"type": "object"})
    elif wanted.json is not None:
        schema = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
        grammar = matcher.grammar_from_json_schema(schema)
    elif wanted.regex is not None:
        grammar = matcher.grammar_from_regex(wanted.regex)
    elif wanted.choice is not None:
        grammar = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
    else:
        grammar = matcher.grammar_from_lark(wanted.grammar)
    return str(grammar)
