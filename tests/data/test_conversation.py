import json

import pytest

from tah2.data.conversation import Conversation, PlainText, parse_prompt, parse_row, without_nulls
from tah2.data.report import BadRow

from .conftest import chat


def test_messages_are_taken_with_their_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = parse_row({"messages": chat("a", "b"), "tools": tools})
    assert row == Conversation(tuple(chat("a", "b")), tuple(tools))
    assert parse_row({"messages": json.dumps(chat("a", "b")), "tools": json.dumps(tools)}) == row


def test_sharegpt_rows_of_am_distilled_become_messages():
    row = {
        "system": "Think first.",
        "conversations": [
            {"from": "human", "value": "q", "info": {"source": "x"}},
            {"from": "assistant", "value": "<think>t</think>\n<answer>a</answer>", "info": {"think_content": "t"}},
        ],
    }
    with_system = parse_row(row)
    assert [m["role"] for m in with_system.messages] == ["system", "user", "assistant"]
    without = parse_row(row, {"system": ""})
    assert without.messages == tuple(chat("q", "<think>t</think>\n<answer>a</answer>"))


def test_tool_use_rows_of_nemotron_become_openai_calls():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "uuid": "u1",
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
            {"role": "assistant", "content": "one", "tool_calls": None},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    messages = parse_row(row).messages
    assert messages[1]["content"] == ""
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert messages[2] == {"role": "tool", "content": "1", "tool_call_id": "c1"}
    assert messages[3] == {"role": "assistant", "content": "one"}


def test_conversational_prompt_and_completion_supervise_the_completion():
    row = parse_row({"prompt": chat("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]})
    assert row == Conversation(tuple(chat("a", "b", "c", "d")), (), 3)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "[1, 2]", "completion": " 3"}, PlainText("[1, 2]", " 3")),
        ({"text": "all of it"}, PlainText("", "all of it")),
        ({"q": "a", "r": "b"}, PlainText("a", "b")),
    ],
)
def test_plain_rows_stay_text(row, expected):
    assert parse_row(row, {"prompt": "q", "completion": "r"} if "q" in row else {}) == expected


def test_content_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = parse_row({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]})
    assert row.messages[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "a"}, "unknown format"),
        ({"messages": []}, "no messages"),
        ({"messages": "hello"}, "no messages"),
        ({"messages": ["hello"]}, "malformed message"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
        ({"messages": chat("a")}, "no assistant message"),
        ({"messages": [*chat("a"), {"role": "assistant", "content": None}]}, "empty message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not text"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]}, "malformed tool call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}]},
            "malformed tool call",
        ),
        ({"messages": chat("a", "b"), "tools": 3}, "malformed tools"),
    ],
)
def test_unusable_rows_say_why(row, reason):
    with pytest.raises(BadRow) as caught:
        parse_row(row)
    assert caught.value.reason == reason


def test_nulls_that_arrow_adds_are_removed():
    assert without_nulls({"a": None, "b": [{"c": 1, "d": None}]}) == {"b": [{"c": 1}]}


def test_prompts_need_no_answer():
    asked = {"role": "user", "content": "q"}
    assert parse_prompt({"messages": [asked]}).messages == (asked,)
    assert parse_prompt({"prompt": "q"}).messages == (asked,)
    assert parse_prompt({"problem": "q"}, {"prompt": "problem"}).messages == (asked,)
    answered = parse_prompt({"prompt": "q", "completion": "a"})
    assert (list(answered.messages), answered.first_supervised) == (chat("q", "a"), 1)
    with pytest.raises(BadRow, match="'messages' or 'prompt'; its columns are question"):
        parse_prompt({"question": "q"})
