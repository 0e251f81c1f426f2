"""Text arrives in whole characters and ends exactly where it should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tah2.engine.config import EngineConfig
from tah2.engine.detokenize import Detokenizer
from tah2.engine.engine import Engine
from tah2.engine.params import SamplingParams
from tests.engine.tiny import EOS, byte_tokenizer, drained, writer


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=12), st.text(max_size=4))
def test_pieces_join_to_the_whole_text(text: str, prompt: str):
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt))
    shown = ""
    for token in tokenizer.encode(text):
        detokenizer.add(token)
        assert detokenizer.ready.startswith(shown)
        shown = detokenizer.ready
        assert "\ufffd" not in shown or "\ufffd" in text
    detokenizer.end()
    assert detokenizer.text == text


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet="abc", min_size=1, max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_text_ends_at_the_first_stop_string_and_no_part_of_it_is_shown(text: str, stops: list[str], keep: bool):
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, [], stops, keep_stop=keep)
    shown = ""
    for token in tokenizer.encode(text):
        found = detokenizer.add(token)
        assert detokenizer.ready.startswith(shown)
        shown = detokenizer.ready
        if found:
            break
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        matches = [stop for stop in stops if text[: ends[0]].endswith(stop)]
        longest = max(matches, key=len)
        kept = text[: ends[0]] if keep else text[: ends[0] - len(longest)]
        assert detokenizer.stopped == longest
        assert detokenizer.ready == kept
    else:
        detokenizer.end()
        assert detokenizer.stopped is None
        assert detokenizer.ready == text


def made(**config: object) -> Engine:
    return Engine(
        writer(),
        EngineConfig(kv_slots=4000, **config),
        tokenizer=byte_tokenizer(),
        eos_token_ids=[EOS],  # type: ignore[arg-type]
    )


def finish(engine: Engine) -> dict[str, object]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({out.request_id: out.outputs[0] for out in engine.step() if out.finished})
    return outputs


@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_a_stop_string_ends_a_request(wavefront_rows: int):
    tokenizer = byte_tokenizer()
    written = expected_bytes(40)
    letters = [token for token in written if 33 <= ord(tokenizer.decode([token])[0]) < 127]
    stop = tokenizer.decode([letters[3]])
    engine = made(wavefront_rows=wavefront_rows)
    engine.add_request("x", "Write", SamplingParams(seed=3, max_tokens=40, stop=[stop]))
    output = finish(engine)["x"]
    assert output.finish_reason == "stop"  # type: ignore[attr-defined]
    assert output.stop_reason == stop  # type: ignore[attr-defined]
    assert stop not in output.text  # type: ignore[attr-defined]
    assert output.token_ids == written[: written.index(letters[3]) + 1] or letters[3] in letters[:3]  # type: ignore[attr-defined]
    drained(engine)


def expected_bytes(count: int) -> list[int]:
    engine = made()
    engine.add_request("x", "Write", SamplingParams(seed=3, max_tokens=count))
    return finish(engine)["x"].token_ids  # type: ignore[attr-defined]


def test_streamed_text_only_grows_and_ends_as_the_whole():
    engine = made()
    engine.add_request("x", "Write", SamplingParams(seed=3, max_tokens=40, stop=["never seen"]))
    shown, counts = "", []
    while engine.has_unfinished_requests():
        for out in engine.step():
            text = out.outputs[0].text
            assert text.startswith(shown)
            shown = text
            counts.append(len(out.outputs[0].token_ids))
    assert counts == sorted(counts)
    assert shown == byte_tokenizer().decode(expected_bytes(40))


def test_logprobs_name_their_tokens():
    engine, tokenizer = made(), byte_tokenizer()
    engine.add_request("x", "Write", SamplingParams(seed=3, max_tokens=5, logprobs=2, prompt_logprobs=1))
    while not (outputs := engine.step(stream=False)):
        pass
    (output,) = outputs
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    assert len(entries) == 4 + 5
    for entry in entries:
        assert entry
        assert all(value.decoded_token == tokenizer.decode([token]) for token, value in entry.items())


def test_text_that_cannot_be_made_fails_one_request_only():
    engine = made()
    for name in ("bad", "good"):
        engine.add_request(name, "Write", SamplingParams(seed=3, max_tokens=5))
    (bad, _) = engine.scheduler.waiting
    assert bad.detokenizer is not None
    bad.detokenizer.add = broken  # type: ignore[method-assign]
    outputs = finish(engine)
    assert outputs["bad"].error == "KeyError: 'no such token'"  # type: ignore[attr-defined]
    assert outputs["good"].token_ids == expected_bytes(5)  # type: ignore[attr-defined]
    drained(engine)


def broken(token: int, look_for_stops: bool = True) -> bool:
    raise KeyError("no such token")
