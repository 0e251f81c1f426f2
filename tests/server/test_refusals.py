"""What cannot be answered is refused with one sentence that names the field, and nothing breaks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.process import ServerProcess
from tests.server.tiny import MAX_LEN, VOCABULARY

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("suffix", "end"),
        ("use_beam_search", True),
        ("bad_words", ["no"]),
        ("logits_processors", ["x"]),
        ("length_penalty", 2.0),
        ("prompt_embeds", "AAAA"),
        ("thinking_token_budget", 100),
    ],
)
def test_known_fields_that_are_not_supported_are_named(server: ServerProcess, field: str, value: Any):
    problem = server.error(TEXT, prompt="x", **{field: value})
    assert problem["param"] == field
    assert problem["code"] == "unsupported_parameter"
    assert repr(field) in problem["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("chat_template", "{{ x }}"),
        ("echo", True),
    ],
)
def test_so_are_those_of_chats(server: ServerProcess, field: str, value: Any):
    assert server.error(CHAT, messages=USER, **{field: value})["param"] == field


def test_neutral_values_and_unknown_fields_are_ignored(server: ServerProcess):
    body: dict[str, Any] = {"best_of": 1, "suffix": None, "metadata": {"a": "b"}, "store": True, "no_such_field": [1]}
    assert server.post(TEXT, prompt="x", max_tokens=1, user="me", **body)["choices"]
    assert server.post(CHAT, messages=USER, max_tokens=1, service_tier="auto", modalities=["text"])["choices"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", "2"),
        ("n", 1 << 40),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("presence_penalty", 3),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("logprobs", 1000),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 1000}),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [7]),
        ("seed", 1 << 70),
        ("max_depth", 0),
        ("exit_threshold", "low"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "xml"}),
    ],
)
def test_wrong_values_are_refused_by_name(server: ServerProcess, field: str, value: Any):
    problem = server.error(TEXT, **{"prompt": "x", field: value})
    assert str(problem["param"]).startswith(field), problem


@pytest.mark.parametrize(
    "prompt", [[], "", [[]], [1, "a"], [[1], "a"], [-1], [VOCABULARY], [1 << 40], None, {"a": 1}, 7]
)
def test_wrong_prompts_are_refused(server: ServerProcess, prompt: Any):
    assert str(server.error(TEXT, prompt=prompt)["param"]).startswith("prompt")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{}],
        [{"role": "user"}],
        [{"role": "oracle", "content": "x"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"text": "untyped"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    ],
)
def test_wrong_messages_are_refused(server: ServerProcess, messages: Any):
    assert str(server.error(CHAT, messages=messages)["param"]).startswith("messages")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"nonsense",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_broken_json_is_refused(server: ServerProcess, body: bytes):
    answer = server.http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_halves_of_characters_in_escaped_arguments_do_no_harm(server: ServerProcess):
    call = {"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
    answer = server.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert answer.status_code in (200, 400)


def test_other_content_types_are_refused(server: ServerProcess):
    """A web page could send them without asking first."""
    answer = server.http.post(TEXT, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_what_is_too_long_is_refused(server: ServerProcess):
    problem = server.error(TEXT, prompt="x" * MAX_LEN)
    assert problem["code"] == "context_length_exceeded"
    problem = server.error(TEXT, prompt="x" * 10, max_tokens=MAX_LEN)
    assert (problem["param"], problem["code"]) == ("max_tokens", "context_length_exceeded")
    assert str(MAX_LEN - 10) in problem["message"]
    assert server.error(CHAT, messages=[{"role": "user", "content": "x" * MAX_LEN}])["param"] == "messages"
    for limit in ("max_tokens", "max_completion_tokens"):
        assert server.error(CHAT, messages=USER, **{limit: MAX_LEN})["param"] == limit
    (choice,) = server.post(TEXT, prompt="x" * MAX_LEN, truncate_prompt_tokens=9, max_tokens=1)["choices"]
    assert choice["text"] is not None


def test_a_request_for_too_many_samples_is_refused(server: ServerProcess):
    assert server.error(TEXT, prompt="x", n=129)["param"] == "n"
    assert server.error(TEXT, prompt=["x"] * 10, n=100)["param"] == "n"
    assert server.error(TEXT, prompt=["x"] * 3000)["param"] == "prompt"


def test_wrong_constraints_are_refused(server: ServerProcess):
    for wanted in ({"json": {"type": "no-such-type"}}, {"grammar": "start: missing"}, {"regex": "("}, {}):
        server.error(TEXT, prompt="x", structured_outputs=wanted)
    body: dict[str, Any] = {"response_format": {"type": "json_schema"}}
    assert server.error(CHAT, messages=USER, **body)["param"] == "response_format"
    server.error(CHAT, messages=USER, tool_choice="required")
    named = {"type": "function", "function": {"name": "absent"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert server.error(CHAT, messages=USER, tools=tools, tool_choice=named)["param"] == "tool_choice"


def test_routes_and_models_that_are_not_there(server: ServerProcess):
    assert server.error("/v1/nothing", status=404)["type"] == "not_found_error"
    assert server.error(TEXT, status=404, prompt="x", model="gpt")["code"] == "model_not_found"
    assert server.http.get(TEXT).status_code == 405
    assert server.http.get("/static/../app.py").status_code == 404
    assert server.http.get("/static/%2e%2e%2fapp.py").status_code == 404


def test_every_answer_has_an_id_and_a_line_in_the_log_without_content(server: ServerProcess):
    answer = server.http.post(
        TEXT, json={"prompt": "private words", "max_tokens": 1}, headers={"X-Request-Id": "mine.1"}
    )
    assert answer.headers["x-request-id"] == "mine.1"
    strange = server.http.get("/health", headers={"X-Request-Id": "a b\tc"})
    assert strange.headers["x-request-id"].startswith("req-")
    server.error(TEXT, prompt="private words", n="private words")
    (line,) = [event for event in server.events if event.get("request_id") == "mine.1"]
    assert line["event"] == "request"
    assert (line["route"], line["status"], line["completion_tokens"]) == (TEXT, 200, 1)
    assert "private words" not in json.dumps(server.log)


def test_pages_of_other_origins_get_no_permission(server: ServerProcess):
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    answer = server.http.options(CHAT, headers=headers)
    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in server.http.get("/health", headers=headers).headers
