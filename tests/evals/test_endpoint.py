"""The client of OpenAI-compatible servers: bounded, retried, and one failure never costs another request."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.evals.endpoint import Answer, EndpointConfig, EndpointRequest, ask_all
from tests.evals.fake_server import FakeServer, Reply, fluent, normal

FAST: dict[str, Any] = {"first_wait": 0.01, "longest_wait": 0.05, "timeout": 60.0}


def question(text: str, **options: Any) -> EndpointRequest:
    return EndpointRequest(messages=[{"role": "user", "content": text}], options=options)


def ask(server: FakeServer, requests: list[EndpointRequest], **settings: Any) -> list[Answer]:
    config = EndpointConfig(server.url, **(FAST | settings))
    found = dict(ask_all(config, enumerate(requests)))
    return [found[index] for index in range(len(requests))]


def asked(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def test_every_request_gets_the_answer_to_itself():
    requests = [question(f"q{i}", seed=i, temperature=0.6, top_k=20) for i in range(40)]
    with FakeServer() as server:
        answers = ask(server, requests, in_flight=8)
    assert [answer.choices[0].text for answer in answers] == [fluent(r.body("fake-teacher")) for r in requests]
    assert all(answer.choices[0].finish_reason == "stop" and answer.model == "fake-teacher" for answer in answers)
    assert {(body["top_k"], body["model"]) for body in server.seen} == {(20, "fake-teacher")}


def test_never_more_than_in_flight_at_once_and_requests_are_drawn_as_places_come_free():
    drawn: list[int] = []

    def requests():
        for i in range(12):
            drawn.append(i)
            yield i, question(f"q{i}")

    with FakeServer(lambda body, tried: Reply(delay=0.1)) as server:
        answers = ask_all(EndpointConfig(server.url, in_flight=3, **FAST), requests())
        next(answers)
        assert len(drawn) < 12
        assert len(list(answers)) == 11
    assert 2 <= server.most_at_once <= 3


@pytest.mark.parametrize(
    "fault",
    [
        Reply(429),
        Reply(429, headers={"retry-after": "0.02"}),
        Reply(500, {"error": {"message": "out of memory"}}),
        Reply(503, b"<html>overloaded</html>"),
        Reply(drop=True),
        Reply(body=b"{not json"),
        Reply(body={"choices": []}),
        Reply(body={"choices": "none"}),
        Reply(body={"error": {"message": "engine died"}}),
    ],
    ids=["429", "retry-after", "500", "503", "drop", "torn", "no-choices", "odd-choices", "error-in-200"],
)
def test_passing_faults_are_tried_again(fault: Reply):
    with FakeServer(lambda body, tried: fault if tried <= 2 and asked(body) == "bad" else None) as server:
        good, bad = ask(server, [question("good"), question("bad")])
    assert (good.error, good.tries, bad.error, bad.tries) == (None, 1, None, 3)
    assert bad.choices[0].text == fluent(question("bad").body("fake-teacher"))


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_waits_as_long_as_the_server_asks(form: str):
    def script(body: dict[str, Any], tried: int) -> Reply | None:
        asked_for = "0.4" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)  # in whole seconds
        arrived.append(time.monotonic())
        return Reply(429, headers={"retry-after": asked_for}) if tried == 1 else None

    arrived: list[float] = []
    with FakeServer(script) as server:
        (answer,) = ask(server, [question("q")], longest_wait=3.0)
    assert answer.error is None
    assert arrived[1] - arrived[0] >= 0.4


def test_a_request_that_is_wrong_fails_alone_and_at_once():
    refusal = Reply(400, {"error": {"message": "This model's context is 10 tokens."}})
    with FakeServer(lambda body, tried: refusal if asked(body) == "long" else None) as server:
        answers = ask(server, [question("a"), question("long"), question("b")])
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert answers[1].error == f"The server at {server.url} answered 400 (This model's context is 10 tokens)"
    assert (answers[1].status, answers[1].tries) == (400, 1)


def test_tries_used_up_are_an_error_of_that_request():
    with FakeServer(lambda body, tried: Reply(500) if asked(body) == "bad" else None) as server:
        good, bad = ask(server, [question("good"), question("bad")], retries=2)
    assert good.error is None
    assert (bad.status, bad.tries) == (500, 3)
    assert bad.error is not None
    assert "answered 500" in bad.error


def test_a_slow_answer_runs_into_its_own_timeout():
    with FakeServer(lambda body, tried: Reply(delay=60.0) if asked(body) == "slow" else None) as server:
        quick, slow = ask(server, [question("quick"), question("slow")], retries=0, timeout=3.0)
    assert quick.error is None
    assert slow.error == f"The server at {server.url} did not answer within 3 s"


def test_a_server_that_dies_stops_the_run_but_not_the_answers_before():
    config: dict[str, Any] = {"in_flight": 1, "retries": 0, "give_up_after": 3}
    with FakeServer(lambda body, tried: None if asked(body) == "q0" else Reply(502)) as server:
        answers = ask_all(EndpointConfig(server.url, **(FAST | config)), ((i, question(f"q{i}")) for i in range(9)))
        assert next(answers)[1].error is None
        with pytest.raises(ConfigError, match=r"answered 502 .*3 requests in a row"):
            list(answers)
    assert len(server.seen) == 4


def test_no_server_is_said_in_one_sentence():
    with FakeServer() as server:
        url = server.url
    with pytest.raises(ConfigError, match=r"cannot be reached .* check the 'url'"):
        list(ask_all(EndpointConfig(url, **FAST), [(0, question("q"))]))
    with pytest.raises(ConfigError, match="cannot be reached"):
        list(ask_all(EndpointConfig(url, model="named", **FAST), [(0, question("q"))]))


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (404, "ends in /v1")])
def test_what_no_request_can_get_past_stops_the_run(status: int, hint: str):
    with (
        FakeServer(lambda body, tried: Reply(status, {"detail": "no"})) as server,
        pytest.raises(ConfigError) as caught,
    ):
        ask(server, [question("q")])
    assert hint in str(caught.value)


def test_the_model_must_be_named_where_there_are_several():
    with FakeServer(models=("a", "b")) as server:
        with pytest.raises(ConfigError, match="lists a, b: say which 'model'"):
            ask(server, [question("q")])
        assert ask(server, [question("q")], model="b")[0].error is None
    assert server.seen[0]["model"] == "b"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    with FakeServer() as server:
        ask(server, [question("q")], api_key_env="TEACHER_KEY")
        ask(server, [question("q")], api_key_env="UNSET_KEY")
    sent = [headers.get("authorization", headers.get("Authorization")) for headers in server.headers]
    assert sent == ["Bearer s3cret", "Bearer s3cret", None, None]


def test_token_ids_depths_and_several_choices_are_read_in_order():
    request = EndpointRequest(prompt=[1, 2, 3], options={"n": 2, "return_token_ids": True, "return_depths": True})
    with FakeServer() as server:
        (answer,) = ask(server, [request])
    first, second = answer.choices
    assert second.text == first.text + " choice 1"
    assert first.token_ids == tuple(range(5))
    assert first.depths == (1, 2, 1, 2, 1)
    assert (answer.prompt_tokens, answer.prompt_token_ids) == (5, (1, 2, 3, 4, 5))
    assert server.seen[0]["prompt"] == [1, 2, 3]


def test_reasoning_and_tool_calls_are_kept_apart():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}

    def script(body: dict[str, Any], tried: int) -> Reply:
        return Reply(body={"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})

    with FakeServer(script) as server:
        (answer,) = ask(server, [question("q")])
    assert answer.choices[0].text == ""
    assert (answer.choices[0].reasoning, answer.choices[0].tool_calls) == ("Hm.", (call,))


def test_leaving_early_cancels_what_is_in_flight():
    with FakeServer(lambda body, tried: Reply(delay=0.0 if asked(body) == "q0" else 60.0)) as server:
        started = time.monotonic()
        answers = ask_all(EndpointConfig(server.url, **FAST), ((i, question(f"q{i}")) for i in range(4)))
        next(answers)
        answers.close()
        assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"url": "localhost:8000"}, "begin with http"),
        ({"in_flight": 0}, "at least 1"),
        ({"timeout": 0}, "positive"),
        ({"first_wait": 9.0, "longest_wait": 1.0}, "between 0 and"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        EndpointConfig(**({"url": "http://localhost/v1"} | settings))


def test_a_request_is_a_chat_or_a_prompt():
    with pytest.raises(ConfigError, match="either"):
        EndpointRequest()
    with pytest.raises(ConfigError, match="either"):
        EndpointRequest(messages=[], prompt="x")
    assert EndpointRequest(prompt="x").body("m") == {"model": "m", "prompt": "x"}
    assert normal({"prompt": "x"})["choices"][0]["text"] == fluent({"prompt": "x"})
