"""Tool use: recorded results are replayed while the teacher makes the recorded calls, and never otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tah2.data.conversation import parse_row
from tah2.distill.episode import answer_text, calls_of
from tah2.distill.run import distill
from tah2.distill.teachers import over_the_wire
from tests.distill.recipes import config, rows_of
from tests.evals.fake_server import FakeServer, Reply

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Where is it?"}


def written(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments})}\n</tool_call>"


def structured(name: str = "c1", **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}


def recorded(form: str) -> dict[str, Any]:
    """Two calls one after the other, then the answer; calls in the text or apart from it."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": "s"}, USER]
    for place in ("box", "bag"):
        call: dict[str, Any] = {"content": "hm " + written(at=place)}
        if form == "structured":
            call = {"content": None, "tool_calls": [structured(f"old-{place}", at=place)]}
        turns.append({"role": "assistant", **call})
        turns.append({"role": "tool", "content": f"in the {place}", "tool_call_id": f"old-{place}"})
    return {"id": "t", "messages": [*turns, {"role": "assistant", "content": "old answer"}], "tools": TOOLS}


def said(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def reply(form: str, call: str | None, text: str = "new answer") -> Reply:
    """The teacher's turn: a call at a place, or text."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reason = "stop"
    if call is not None and form == "structured":
        message |= {"content": None, "reasoning_content": "new", "tool_calls": [structured("new-" + call, at=call)]}
        reason = "tool_calls"
    elif call is not None:
        message["content"] = "<think>\nnew\n</think>\n\n" + written(at=call)
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    return Reply(body={"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage})


@pytest.mark.parametrize("form", ["written", "structured"])
def test_the_same_calls_get_the_recorded_results_under_the_teachers_own_ids(tmp_path: Path, form: str):
    calls = {"Where is it?": "box", "in the box": "bag", "in the bag": None}
    with FakeServer(lambda body, tried: reply(form, calls[said(body)])) as server:
        distill(config(tmp_path, [recorded(form)], server.url))
    (row,) = rows_of(tmp_path / "out")
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [m["content"] for m in row["messages"] if m["role"] == "tool"] == ["in the box", "in the bag"]
    assert row["messages"][-1]["content"] == "new answer"
    assert "old" not in json.dumps([m for m in row["messages"] if m["role"] == "assistant"])
    assert row["tools"] == TOOLS
    assert row["provenance"]["replayed_tool_results"] == 2
    assert row["provenance"]["completion_tokens"] == 9
    assert len(set(row["provenance"]["seeds"])) == 3
    assert [body["tools"] for body in server.seen] == [TOOLS] * 3
    if form == "structured":
        assert [m["tool_call_id"] for m in row["messages"] if m["role"] == "tool"] == ["new-box", "new-bag"]
        assert row["messages"][2]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "box"}}
        sent = server.seen[1]["messages"]
        assert (sent[2]["tool_calls"][0]["id"], sent[3]["tool_call_id"]) == ("new-box", "new-box")
        assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"at": "box"}'
    parse_row(row)


@pytest.mark.parametrize("form", ["written", "structured"])
def test_another_call_ends_the_sample_as_nobody_can_answer_it(tmp_path: Path, form: str):
    calls = {"Where is it?": "box", "in the box": "cellar"}
    with FakeServer(lambda body, tried: reply(form, calls[said(body)])) as server:
        distill(config(tmp_path, [recorded(form)], server.url))
    (row,) = rows_of(tmp_path / "out")
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert calls_of(row["messages"][-1]) == (("look", '{"at": "cellar"}'),)
    assert len(server.seen) == 2


def test_an_answer_without_a_call_ends_it_too(tmp_path: Path):
    with FakeServer(lambda body, tried: reply("written", None)) as server:
        distill(config(tmp_path, [recorded("written")], server.url))
    (row,) = rows_of(tmp_path / "out")
    assert [message["content"] for message in row["messages"]] == ["s", "Where is it?", "new answer"]
    assert "replayed_tool_results" not in row["provenance"]


def test_recorded_tool_use_may_be_kept_or_dropped_instead(tmp_path: Path):
    plain = {"id": "p", "messages": [USER | {"content": "plain"}]}
    with FakeServer() as server:
        changes = {"tool_results": "keep", "teacher": {"name": "T"}}
        kept = distill(config(tmp_path, [recorded("written"), plain], server.url, **changes))
        rows = rows_of(tmp_path / "out")
        changes = {"tool_results": "drop", "out": str(tmp_path / "dropped")}
        dropped = distill(config(tmp_path, [recorded("written"), plain], server.url, **changes))
    assert (kept.kept.total(), rows[0]["messages"][-1]["content"]) == (2, "old answer")
    assert (rows[0]["provenance"]["teacher"], rows[1]["provenance"]["teacher"]) == ("recorded", "T")
    assert dict(dropped.dropped) == {"answered with tool results": 1}
    assert [said(body) for body in server.seen] == ["plain", "plain"]


@pytest.mark.parametrize(
    ("content", "calls"),
    [
        ("no call", ()),
        (written(b=1, a=2), (("look", '{"a": 2, "b": 1}'),)),
        (f"<think>maybe {written(x=1)}?</think>\nno", ()),
        ('<tool_call>{"name": "look"}</tool_call>', (("look", "{}"),)),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', None),
        ('<tool_call>{"arguments": {}}</tool_call>', None),
        ("<tool_call>look(1)</tool_call>", None),
        ('<tool_call>[{"name": "look", "arguments": {}}]</tool_call>', None),
        ('<tool_call>"look"</tool_call>', None),
        ('<tool_call>{"function": "look", "arguments": {}}</tool_call>', None),
        (written(x=1) + "<tool_call>{", None),
    ],
)
def test_calls_are_read_from_the_text_behind_the_thinking(content: str, calls: Any):
    assert calls_of({"role": "assistant", "content": content}) == calls


def test_the_answer_is_what_follows_the_thinking():
    assert answer_text({"content": "<think>\na\n</think>\n\n b "}) == "b"
    assert answer_text({"content": "a</think>b"}) == "b"
    assert answer_text({"content": " b"}) == "b"


def test_servers_get_ids_that_match_where_the_data_have_none():
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look"}}] * 2},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    sent = over_the_wire(messages)
    assert [call["id"] for call in sent[1]["tool_calls"]] == [result["tool_call_id"] for result in sent[2:]]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert "id" not in messages[1]["tool_calls"][0]
