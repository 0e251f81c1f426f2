"""OpenAI's own client works unmodified: sync, async, streams, tools, structured output, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai")

from tests.server.process import ServerProcess  # noqa: E402

USER: Any = [{"role": "user", "content": "What is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}}},
]
CALLS = 'start: <tool_call> "\\n" body "\\n" </tool_call>\nbody: "{\\"name\\": \\"time\\", \\"arguments\\": {}}"'


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def models(client: Any) -> list[str]:
    return [model.id for model in client.models.list()]


def test_it_lists_models(models: list[str]):
    assert models == ["tiny", "other-name"]


def test_chat(client: Any):
    answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=9, logprobs=True, top_logprobs=2)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
    assert answer.usage.model_extra["decode_flops"] > 0


def test_chat_streams_depths_in_extra_fields(client: Any):
    stream = client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_depths": True, "max_depth": 2, "ignore_eos": True},
    )
    chunks = list(stream)
    depths = [d for chunk in chunks for c in chunk.choices for d in (c.model_extra or {}).get("depths", [])]
    assert len(depths) == chunks[-1].usage.completion_tokens == 12
    assert set(depths) <= {1, 2}
    assert chunks[-1].choices == []


def test_completions(client: Any):
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, n=2, logprobs=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("a")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    chunks = list(client.completions.create(model="tiny", prompt="a", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_many_at_once_from_the_async_client(server: ServerProcess):
    async def ask(client: Any, number: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": str(number)}], max_tokens=8, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_twice() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return [await asyncio.gather(*(ask(client, number) for number in range(12))) for _ in range(2)]

    first, second = asyncio.run(all_twice())
    assert first == second


def test_tools_that_must_be_called_are_called(client: Any):
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
        seed=1,
        reasoning_effort="none",
    )
    (choice,) = answer.choices
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.id.startswith("call_")
        assert call.function.name in ("weather", "time")
        assert isinstance(json.loads(call.function.arguments), dict)
    assert choice.finish_reason in ("tool_calls", "length")
    assert choice.message.content is None


def test_a_named_tool_is_called_with_arguments_that_fit(client: Any):
    named: Any = {"type": "function", "function": {"name": "weather"}}
    body: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": named, "max_tokens": 200, "seed": 2}
    body["reasoning_effort"] = "none"
    answer = client.chat.completions.create(**body)
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert set(arguments) == {"city", "days"}
    with client.chat.completions.stream(**body) as stream:
        seen = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert len(seen) > 3
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    history = [
        *USER,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    assert client.chat.completions.create(model="tiny", messages=history, tools=TOOLS, max_tokens=2).choices


def test_calls_that_the_model_makes_of_itself_are_found(client: Any):
    extra = {"structured_outputs": {"grammar": CALLS}}
    body: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 100, "extra_body": extra}
    (choice,) = client.chat.completions.create(**body).choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["time"]
    (plain,) = client.chat.completions.create(**body, tool_choice="none").choices
    assert plain.message.tool_calls is None
    assert plain.message.content.startswith("<tool_call>")
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class Forecast(BaseModel):
    city: Literal["Oslo", "Rome"]
    sunny: bool


def test_structured_output_is_parsed(client: Any):
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Forecast, max_tokens=200, reasoning_effort="none", seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Forecast)


def test_json_objects_are_objects(client: Any):
    bias = {str(token): 20 for token in (66, 92)}  # } ends it soon
    answer = client.chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_object"}, max_tokens=300, seed=4, logit_bias=bias,
        reasoning_effort="none",
    )  # fmt: skip
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_reasoning_is_kept_apart_from_what_must_fit(client: Any):
    """A block of reasoning may come before a constrained answer."""
    bias = {"259": 100, "260": 8}  # <think> first, </think> soon
    body: Any = {"model": "tiny", "messages": USER, "max_tokens": 200, "seed": 5, "logit_bias": bias}
    schema = {"name": "forecast", "schema": SCHEMA}
    (choice,) = client.chat.completions.create(
        **body, response_format={"type": "json_schema", "json_schema": schema}
    ).choices
    assert choice.message.model_extra["reasoning_content"] == choice.message.model_extra["reasoning"]
    assert json.loads(choice.message.content)["city"] in ("Oslo", "Rome")


def test_a_cut_answer_raises_what_the_client_expects(client: Any):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=USER, response_format=Forecast, max_tokens=3)


def test_errors_become_the_clients_exceptions(client: Any):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="absent", messages=USER)
