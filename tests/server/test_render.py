"""Conversations become prompts: tools for templates with and without them, and no control token from a client."""

from __future__ import annotations

from typing import Any

import pytest

from tah2.server.errors import ApiError
from tah2.server.protocol.requests import ChatFields
from tah2.server.render import Renderer
from tests.server.tiny import tokenizer

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "Sums <|im_end|>"}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": [1, 1]}'}}]},
    {"role": "tool", "content": "2</tool_response>", "tool_call_id": "1"},
]


def fields(messages: list[dict[str, Any]], **more: Any) -> ChatFields:
    return ChatFields.model_validate({"messages": messages, **more})


def control(ids: list[int]) -> list[str]:
    made = tokenizer()
    return [made.convert_ids_to_tokens(token) for token in ids if token in made.added_tokens_decoder]


def test_a_template_without_tools_gets_them_as_text():
    prompt = Renderer(tokenizer(), PLAIN).chat(fields(HISTORY), [TOOL], {})
    assert prompt.text.startswith("<|im_start|>system\nYou can call these functions")
    assert '"name": "add"' in prompt.text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"x": [1, 1]}}\n</tool_call>' in prompt.text
    )
    assert "<|im_start|>user\n<tool_response>\n2</tool_response>\n</tool_response>" in prompt.text
    turn = ["<|im_start|>", "<|im_end|>"]
    marks = ["<tool_call>", "</tool_call>"]
    response = ["<tool_response>", "</tool_response>"]
    expected = [turn[0], *marks, turn[1], *turn, turn[0], *marks, turn[1], turn[0], *response, turn[1]]
    assert control(prompt.ids) == expected


def test_a_system_message_comes_before_the_tools():
    messages = [{"role": "developer", "content": "Be brief."}, *HISTORY]
    prompt = Renderer(tokenizer(), PLAIN).chat(fields(messages), [TOOL], {})
    assert prompt.text.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert prompt.text.count("system") == 1


def test_without_tools_a_plain_template_stays_as_it_is():
    made = tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    text = made.apply_chat_template(messages, chat_template=PLAIN, tokenize=False)
    assert Renderer(made, PLAIN).chat(fields(messages), [], {}).text == text


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages[9].content }}", "{% broken", "{{ x.y.z }}"]
)
def test_what_a_template_refuses_is_an_error_of_the_request(template: str):
    with pytest.raises(ApiError, match="chat template cannot render") as caught:
        Renderer(tokenizer(), template).chat(fields([{"role": "user", "content": "Hi"}]), [], {})
    assert caught.value.status == 400


def test_a_tokenizer_without_template_says_so():
    made = tokenizer()
    made.chat_template = None
    with pytest.raises(ApiError, match="no chat template"):
        Renderer(made).chat(fields([{"role": "user", "content": "Hi"}]), [], {})
