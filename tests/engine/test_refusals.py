"""A mistake in a configuration or a request is one sentence that says what to do, before anything runs."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.params import SamplingParams, StructuredOutputsParams
from tah2.engine.structured import GrammarMasks
from tests.engine.tiny import byte_tokenizer, engine


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"wavefront_rows": -1}, "wavefront_rows must not be negative"),
        ({"kv_memory_gib": 0.0}, "kv_memory_gib must be positive"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must lie in"),
    ],
)
def test_engines_are_refused(given: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, "n must be a number of at least 1"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"top_k": -2}, "top_k must be a number of at least -1"),
        ({"top_p": 0.0}, "top_p must lie above 0"),
        ({"min_p": 1.1}, "min_p must lie between"),
        ({"presence_penalty": 3.0}, "presence_penalty must lie between"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a positive"),
        ({"max_tokens": 0}, "max_tokens must be a number of at least 1"),
        ({"logprobs": -1}, "logprobs must be a number of at least 0"),
        ({"exit_threshold": float("nan")}, "exit_threshold must be a number"),
        ({"stop": [""]}, "must not be empty"),
        ({"stop": "x", "detokenize": False}, "need detokenize"),
        ({"depth_logprobs": True}, "needs logprobs"),
    ],
)
def test_sampling_parameters_are_refused(given: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("kind", "prompt", "given", "words"),
    [
        ("standard", "text", {}, "pass token ids"),
        ("standard", [1], {"allowed_token_ids": []}, "at least one token"),
        ("ouro", [1], {"logprobs": 1, "depth_logprobs": True}, "mixes the predictions"),
        ("standard", [1], {"structured_outputs": StructuredOutputsParams(json_object=True)}, "structured extra"),
    ],
)
def test_requests_are_refused(kind: str, prompt: Any, given: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        engine(kind).add_request("x", prompt, SamplingParams(**given))


def test_without_its_extra_structured_output_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="install the structured extra"):
        GrammarMasks(byte_tokenizer(), 257)(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(
    "wanted", [StructuredOutputsParams(json="{"), StructuredOutputsParams(json={"type": "nothing known"})]
)
def test_schemas_that_are_none_are_refused(wanted: StructuredOutputsParams):
    with pytest.raises(ConfigError, match="cannot be compiled"):
        GrammarMasks(byte_tokenizer(), 257)(wanted)
