"""Constraints hold for the mixture and for drafts: the text always fits, and wavefront changes nothing."""

from __future__ import annotations

import json
import re

import pytest

from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.engine import Engine
from tah2.engine.params import SamplingParams, StructuredOutputsParams
from tah2.engine.reference import generate
from tah2.engine.structured import GrammarMasks
from tests.engine.tiny import EOS, byte_tokenizer, drained, writer

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


def made(wavefront_rows: int) -> Engine:
    tokenizer = byte_tokenizer()
    return Engine(
        writer(),
        EngineConfig(kv_slots=4000, wavefront_rows=wavefront_rows),
        tokenizer=tokenizer,
        eos_token_ids=[EOS],
        mask_factory=GrammarMasks(tokenizer, 257),
    )


@pytest.mark.parametrize("wavefront_rows", [0, 99])
@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex="[ab]{3}-[0-9]{2,4}!"),
        StructuredOutputsParams(choice=["yes", "no", 'perhaps "so"']),
        StructuredOutputsParams(grammar='start: "x" middle+ "z"\nmiddle: /[cd]/'),
    ],
    ids=["json", "regex", "choice", "grammar"],
)
def test_constrained_text_equals_the_constrained_reference(wanted: StructuredOutputsParams, wavefront_rows: int):
    tokenizer, engine = byte_tokenizer(), made(wavefront_rows)
    for seed in range(3):
        params = SamplingParams(seed=seed, max_tokens=60, exit_threshold=0.0, structured_outputs=wanted)
        engine.add_request(f"r{seed}", "Say it:", params)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({out.request_id: out.outputs[0] for out in engine.step() if out.finished})
    for seed in range(3):
        params = SamplingParams(seed=seed, max_tokens=60, exit_threshold=0.0, structured_outputs=wanted)
        mask = GrammarMasks(tokenizer, 257)(wanted)
        truth = generate(writer(), tokenizer.encode("Say it:"), params, [EOS], mask=mask)
        output = outputs[f"r{seed}"]
        assert output.token_ids == truth.token_ids
        assert output.depths == truth.depths
        if output.finish_reason == "stop":
            assert fits(wanted, output.text), output.text
    assert any(output.finish_reason == "stop" for output in outputs.values())
    assert wavefront_rows == 0 or engine.stats.drafted > 0
    drained(engine)


def fits(wanted: StructuredOutputsParams, text: str) -> bool:
    if wanted.json is not None:
        value = json.loads(text)
        return set(value) == {"n", "ok"} and 0 <= value["n"] <= 99 and isinstance(value["ok"], bool)
    if wanted.regex is not None:
        return re.fullmatch(wanted.regex, text) is not None
    if wanted.choice is not None:
        return text in wanted.choice
    return re.fullmatch("x[cd]+z", text) is not None


def test_a_constraint_that_cannot_be_compiled_is_refused_at_once():
    with pytest.raises(ConfigError, match="cannot be compiled"):
        made(0).add_request("x", "Say", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
    with pytest.raises(ConfigError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["b"])
