"""Prompts in, training data out: what is asked, what is kept, and what the report says of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.distill.run import distill
from tests.data.conftest import chat
from tests.distill.recipes import config, question, rows_of
from tests.evals.fake_server import FakeServer, Reply, fluent, normal


def saying(text: str, finish_reason: str = "stop", **message: Any) -> Reply:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text, **message}}
    return Reply(body={"model": "m", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 7}})


def asked(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def test_every_prompt_gets_the_teachers_answer_with_its_provenance(tmp_path: Path):
    rows = [question(f"question {i}") for i in range(9)]
    with FakeServer() as server:
        report = distill(config(tmp_path, rows, server.url))
    made = rows_of(tmp_path / "out")
    sent = {asked(body): body for body in server.seen}
    assert [row["messages"][0]["content"] for row in made] == [f"question {i}" for i in range(9)]
    assert [row["messages"][1]["content"] for row in made] == [fluent(sent[f"question {i}"]) for i in range(9)]
    assert (report.rows, report.dropped.total()) == ({"train.jsonl": 9, "validation.jsonl": 0}, 0)
    (first, *_), body = made, sent["question 0"]
    assert first["id"] == "question-0"
    assert first["provenance"] == {
        "teacher": "fake-teacher",
        "source": str(tmp_path / "prompts.jsonl"),
        "source_id": "question-0",
        "prompt": first["provenance"]["prompt"],
        "finish_reason": "stop",
        "tokens": 5 + len(fluent(body).split()),
        "sampling": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "max_tokens": 64},
        "seeds": [body["seed"]],
        "sample": 0,
        "completion_tokens": len(fluent(body).split()),
    }
    assert len({body["seed"] for body in server.seen}) == 9
    assert {(body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) for body in server.seen} == {
        (0.6, 0.95, 20, 64)
    }


def test_each_prompt_dropped_is_counted_under_one_reason_with_its_place(tmp_path: Path):
    replies = {
        "cut": saying("never end", "length"),
        "blank": saying("<think>\nhm\n</think>\n\n  "),
        "open": saying("<think>\nhm, so"),
        "call": saying('<tool_call>\n{"name": "f", "arg'),
        "other": saying("x", "content_filter"),
        "refused": Reply(400, {"error": {"message": "too long for me"}}),
        "failing": Reply(500),
        "good": saying("<think>\nhm\n</think>\n\n4"),
    }
    rows: list[Any] = [question(name) for name in replies]
    rows += [question("good"), {"id": "none", "messages": []}, {"messages": [{"role": "system", "content": "s"}]}]
    with FakeServer(lambda body, tried: replies[asked(body)]) as server:
        report = distill(config(tmp_path, rows, server.url))
    assert dict(report.dropped) == {
        "truncated": 1,
        "empty": 1,
        "unfinished thinking": 1,
        "malformed tool call": 1,
        "not finished": 1,
        "refused by the teacher": 1,
        "not answered yet": 1,
        "duplicate prompt": 1,
        "unusable row: no messages": 1,
        "unusable row: no user message": 1,
    }
    assert [row["id"] for row in rows_of(tmp_path / "out")] == ["good"]
    assert report.read.total() == report.kept.total() + report.dropped.total() == len(rows)
    prompts = tmp_path / "prompts.jsonl"
    assert report.examples["duplicate prompt"] == [f"{prompts}:9: as {prompts}:8"]
    assert "too long for me" in report.examples["refused by the teacher"][0]
    assert "answered 500" in report.examples["not answered yet"][0]
    written = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert written["prompts"] == {"read": len(rows), "kept": 1, "dropped": 10}
    assert written["dropped"]["truncated"]["count"] == 1


def test_prompts_that_differ_in_white_space_alone_are_asked_once_over_all_sources(tmp_path: Path):
    with FakeServer() as server:
        distill(config(tmp_path, [question("a  b\n"), question("a b"), question("A b")], server.url))
    assert sorted(asked(body) for body in server.seen) == ["A b", "a  b\n"]


def test_what_stands_before_the_last_user_message_is_given_as_it_is(tmp_path: Path):
    row = {"id": "x", "messages": [{"role": "system", "content": "s"}, *chat("one", "1", "two", "2")]}
    with FakeServer() as server:
        distill(config(tmp_path, [row], server.url))
    (body,) = server.seen
    assert [message["content"] for message in body["messages"]] == ["s", "one", "1", "two"]
    (made,) = rows_of(tmp_path / "out")
    assert [message["content"] for message in made["messages"]] == ["s", "one", "1", "two", fluent(body)]


def test_prompts_need_no_recorded_answer_and_columns_may_have_other_names(tmp_path: Path):
    rows = [{"problem": "why"}, {"problem": "how"}]
    with FakeServer() as server:
        setup = config(tmp_path, rows, server.url)
        distill(
            config(
                tmp_path, rows, server.url, sources=[{"path": setup.sources[0].path, "columns": {"prompt": "problem"}}]
            )
        )
    made = rows_of(tmp_path / "out")
    assert [row["messages"][0] for row in made] == [{"role": "user", "content": text} for text in ("why", "how")]
    assert all(row["id"] == row["provenance"]["prompt"] for row in made)


def test_thinking_stays_in_the_row_however_the_server_gives_it(tmp_path: Path):
    replies = {
        "whole": saying("<think>\nhm\n</think>\n\n4"),
        "tail": saying("hm\n</think>\n\n4"),
        "apart": saying("4", reasoning_content="hm"),
    }
    with FakeServer(lambda body, tried: replies[asked(body)]) as server:
        distill(config(tmp_path, [question(name) for name in replies], server.url))
    whole, tail, apart = (row["messages"][-1] for row in rows_of(tmp_path / "out"))
    assert whole == tail == {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    assert apart == {"role": "assistant", "content": "4", "reasoning_content": "hm"}


def test_held_out_rows_follow_from_seed_and_prompts_and_are_a_tenth_at_most(tmp_path: Path):
    rows = [question(f"q{i}") for i in range(40)]
    with FakeServer() as server:
        three = distill(config(tmp_path, rows, server.url, held_out=3))
        chosen = [row["id"] for row in rows_of(tmp_path / "out", "validation.jsonl")]
        backwards = distill(config(tmp_path, rows[::-1], server.url, held_out=3, out=str(tmp_path / "other")))
        capped = distill(config(tmp_path, rows, server.url, held_out=1000))
    assert three.rows == backwards.rows == {"train.jsonl": 37, "validation.jsonl": 3}
    assert capped.rows == {"train.jsonl": 36, "validation.jsonl": 4}
    assert {row["id"] for row in rows_of(tmp_path / "other", "validation.jsonl")} == set(chosen)
    train = {row["id"] for row in rows_of(tmp_path / "out")}
    assert len(train) == 36
    assert not train & {row["id"] for row in rows_of(tmp_path / "out", "validation.jsonl")}


def test_the_best_of_several_answers(tmp_path: Path):
    texts = ["", "long and long", "short"]

    def script(body: dict[str, Any], tried: int) -> Reply:
        text = texts[seeds.setdefault(body["seed"], len(seeds))]
        return Reply(body=normal(body, text) | {"usage": {"prompt_tokens": 2, "completion_tokens": len(text)}})

    for choose, kept in (("first", ["long and long"]), ("shortest", ["short"]), ("all", ["long and long", "short"])):
        seeds: dict[int, int] = {}
        with FakeServer(script) as server:
            changes = {"sampling": {"samples": 3}, "filter": {"choose": choose}, "out": str(tmp_path / choose)}
            changes["teacher"] = {"endpoint": {"in_flight": 1}}
            report = distill(config(tmp_path, [question("q")], server.url, **changes))
        made = rows_of(tmp_path / choose)
        assert [row["messages"][-1]["content"] for row in made] == kept
        assert report.kept.total() == 1
        assert len({row["id"] for row in made}) == len(made)


def test_recorded_answers_are_filtered_without_a_teacher(tmp_path: Path):
    rows = [question("a", "fine"), question("b", "<think>\nno end"), question("c", "good"), question("a", "again")]
    setup = config(tmp_path, rows)
    changed = {"endpoint": None, "recorded": True, "name": "Qwen3-235B-A22B"}
    report = distill(config(tmp_path, rows, teacher=changed))
    assert dict(report.dropped) == {"unfinished thinking": 1, "duplicate prompt": 1}
    made = rows_of(setup.out)
    assert [row["messages"][-1]["content"] for row in made] == ["fine", "good"]
    assert made[0]["provenance"]["teacher"] == "Qwen3-235B-A22B"
    assert report.uncounted == 2


def test_answers_of_another_teacher_are_not_mixed(tmp_path: Path):
    rows = [question("a")]
    with FakeServer(models=("a", "b")) as server:
        distill(config(tmp_path, rows, server.url))
        distill(config(tmp_path, rows, server.url, filter={"max_tokens": 9000}))
        with pytest.raises(ConfigError, match="another 'sampling': choose another 'out'"):
            distill(config(tmp_path, rows, server.url, sampling={"temperature": 1.0}))
        with pytest.raises(ConfigError, match="another 'teacher'"):
            distill(config(tmp_path, rows, server.url, teacher={"endpoint": {"model": "b"}}))
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"teacher": {"recorded": True}}, "Name one teacher"),
        ({"sources": []}, "at least one source"),
        ({"sampling": {"temperature": 0, "samples": 2}}, "all samples are the same"),
        ({"sampling": {"max_token": 2}}, "did you mean 'max_tokens'"),
        ({"filter": {"choose": "best"}}, "must be one of"),
        ({"held_out": -1}, "at least 0"),
    ],
)
def test_recipes_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        config(tmp_path, [question("a")], **changes)


def test_nothing_to_ask_says_why(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"No prompt is left to ask.*no messages"):
        distill(config(tmp_path, [{"messages": []}]))
