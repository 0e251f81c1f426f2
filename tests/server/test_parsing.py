"""Reasoning and tool calls are read the same however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tah2.server.reasoning import ReasoningSplitter
from tah2.server.toolcalls import Argued, Called, Said, ToolCallReader


def split(pieces: list[str], inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def read(pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls."""
    reader = ToolCallReader(most)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    text, calls = "", list[tuple[str, str]]()
    for event in events:
        if isinstance(event, Said):
            text += event.text
        elif isinstance(event, Called):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, Argued)
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    return text, calls


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
        ("\n<think>Hm.</think>Yes.\n", False, ("Hm.", "Yes.\n")),
        ("Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("<think>never ends", False, ("never ends", "")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("<thin air>", False, ("", "<thin air>")),
        ("<think>a </thin b</think>c", False, ("a </thin b", "c")),
        ("", False, ("", "")),
        ("<thi", False, ("", "<thi")),
    ],
)
def test_reasoning_is_split_however_it_is_cut(text: str, inside: bool, expected: tuple[str, str]):
    assert split([text], inside) == expected
    for size in (1, 2, 3, 7):
        assert split([text[at : at + size] for at in range(0, len(text), size)], inside) == expected


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call> }{"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (CALL, "", [("f", '{"x": "</tool_call> }{"}')]),
        (f"Let me.\n{CALL}\n{CALL}", "Let me.", [("f", '{"x": "</tool_call> }{"}')] * 2),
        (
            '<tool_call>{"arguments": {"a": [1, {"b": 2}]}, "name": "g"}</tool_call>',
            "",
            [("g", '{"a": [1, {"b": 2}]}')],
        ),
        ('<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("g", '{"a": 1}')]),
        ('<tool_call>{"name": "g", "arguments": {"a": 1}}', "", [("g", '{"a": 1}')]),
        ('<tool_call>{"name": "g", "arguments": {"a": "cut of', "", [("g", '{"a": "cut of')]),
        ("<tool_call>nonsense</tool_call> rest", "<tool_call>nonsense</tool_call> rest", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("a < b <tool_ca", "a < b <tool_ca", []),
        ("blanks at the end \n", "blanks at the end \n", []),
        ('<tool_call>{"name": "\\x", "arguments": {}}</tool_call>', "", [("\\x", "{}")]),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "", [("?", "{}")]),
    ],
)
def test_calls_are_read_however_they_are_cut(text: str, said: str, calls: list[tuple[str, str]]):
    assert read([text]) == (said, calls)
    for size in (1, 2, 5, 11):
        assert read([text[at : at + size] for at in range(0, len(text), size)]) == (said, calls)


def test_arguments_are_streamed_before_the_call_ends():
    reader = ToolCallReader()
    assert reader.feed('<tool_call>{"name": "f", "argu') == []
    assert reader.feed('ments": {"x": ') == [Called(0, "f"), Argued(0, '{"x": ')]
    assert reader.feed("12") == [Argued(0, "12")]
    assert reader.feed("}}") == [Argued(0, "}")]
    assert reader.feed("\n</tool_call>") == []


def test_calls_beyond_the_allowed_number_are_dropped():
    assert read([f"{CALL}{CALL}"], most=1) == ("", [("f", '{"x": "</tool_call> }{"}')])


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {', '"a": "b\\""', "}", "}}"]
TEXT = st.lists(st.sampled_from([*MARKS, "\n", " ", "text", '"', "\\", "<", "</"]), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXT, st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_any_text_cut_anywhere_reads_the_same(text: str, cuts: list[int], inside: bool):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert split(pieces, inside) == split([text], inside)
    assert read(pieces) == read([text])


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_arguments_come_back(value: object):
    arguments = json.dumps({"v": value})
    assert read([f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>']) == ("", [("f", arguments)])
