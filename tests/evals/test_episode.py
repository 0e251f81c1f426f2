"""Episodes: gold calls played through a conversation pass the checker; what small models write is read safely."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.evals.episode import MORE_FUNCTIONS, MOST_STEPS, as_text, assistant_message, episode, play, tool, tool_calls
from tah2.evals.graders import grade_many, grader_of
from tah2.evals.graders.grader import Said
from tah2.evals.task import Problem, Task
from tah2.evals.tasks import task_named
from tests.evals.benchmarks_here import problems

Respond = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str | None]


@pytest.fixture(params=["bfcl_v3", "bfcl_v4"])
def task(request: pytest.FixtureRequest) -> Task:
    found = task_named(request.param)
    try:
        grader_of(found).path()
    except ConfigError as error:
        pytest.skip(str(error))
    return found


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def as_hermes(call: str, tools: list[dict[str, Any]]) -> str:
    """A gold call, `f(1, b=2)`, as a model would write it."""
    node: Any = ast.parse(call, mode="eval").body
    parameters = {each["function"]["name"]: list(each["function"]["parameters"]["properties"]) for each in tools}
    arguments = dict(zip(parameters[node.func.id], map(ast.literal_eval, node.args), strict=False))
    return hermes(node.func.id, arguments | {each.arg: ast.literal_eval(each.value) for each in node.keywords})


def gold_model(problem: Problem, one_at_a_time: bool = False) -> Respond:
    """Makes the gold calls of every turn, together or step by step, then says that it is done."""
    turns = iter(problem.data["ground_truth"])
    waiting: list[str] = []

    def respond(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        if messages[-1]["role"] == "user":
            waiting[:] = next(turns)
        now = waiting[: 1 if one_at_a_time else None]
        del waiting[: len(now)]
        return "<think>Which?</think>" + "\n".join(as_hermes(call, tools) for call in now) if now else "Done."

    return respond


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_gold_calls_played_in_a_conversation_are_right(task: Task, one_at_a_time: bool):
    chosen = problems(task.name)[::100]
    items = [(problem, Said("", play(task, problem, gold_model(problem, one_at_a_time)))) for problem in chosen]
    assert [grade.note for grade in grade_many(task, items) if not grade.correct] == []


def test_results_of_calls_come_back_and_state_is_kept(task: Task):
    problem = next(each for each in problems(task.name) if "GorillaFileSystem" in each.data["involved_classes"])
    said = iter([hermes("mkdir", {"dir_name": "new"}), hermes("cd", {"folder": "new"}), hermes("pwd", {})])
    results: list[str] = []

    def respond(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        results.extend(message["content"] for message in messages[-1:] if message["role"] == "tool")
        return next(said, "Done.")

    play(task, problem, respond)
    assert "new" in results[1]
    assert "/new" in results[2]


def test_withheld_functions_appear_when_the_user_says_so(task: Task):
    problem = next(each for each in problems(task.name) if each.data["category"] == "multi_turn_miss_func")
    (turn, names), *_ = problem.data["missed_function"].items()
    offered: dict[int, set[str]] = {}
    asked: list[str] = []

    def respond(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        offered[len(offered)] = {each["function"]["name"] for each in tools}
        asked.append(messages[-1]["content"])
        return "No."

    play(task, problem, respond)
    assert asked[int(turn)] == MORE_FUNCTIONS
    assert not set(names) & offered[int(turn) - 1]
    assert set(names) <= offered[int(turn)]


def test_too_many_steps_in_a_turn_end_the_episode(task: Task):
    problem = problems(task.name)[0]
    extra = play(task, problem, lambda messages, tools: hermes("ls", {}))
    assert (extra["ending"], extra["answers"], len(extra["turns"])) == ("steps", MOST_STEPS + 1, 1)
    assert grade_many(task, [(problem, Said("", extra))])[0].correct == 0


def test_no_room_for_an_answer_ends_the_episode(task: Task):
    extra = play(task, problems(task.name)[0], lambda messages, tools: None)
    assert extra == {"turns": [[]], "ending": "length", "answers": 0}


def test_an_episode_is_a_function_of_its_answers(task: Task):
    problem = problems(task.name)[0]
    first = [play(task, problem, gold_model(problem)) for _ in range(2)]
    assert first[0] == first[1]
    playing = episode(task, problem)
    ask = next(playing)
    assert ask.messages == problem.data["question"][0]
    assert all(each["type"] == "function" for each in ask.tools)
    playing.close()


def test_errors_of_calls_are_told_to_the_model(task: Task):
    said = iter([hermes("no_such_function", {"a": 1}) + hermes("ls", {"nonsense": 1})])
    seen: list[str] = []

    def respond(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        seen.extend(message["content"] for message in messages if message["role"] == "tool")
        return next(said, "Done.")

    play(task, problems(task.name)[0], respond)
    assert all("Error during execution" in result for result in seen)
    assert seen


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (hermes("cd", {"folder": "a'b"}), ['cd(folder="a\'b")']),
        ("<tool_call>{'name': 'f', 'arguments': {'x': True, 'y': None}}</tool_call>", ["f(x=True,y=None)"]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', ["f(x=1)"]),
        ("text " + hermes("f", {}) + " and " + hermes("g", {"x": [1, {"y": 2}]}), ["f()", "g(x=[1, {'y': 2}])"]),
        (hermes("f", {})[: -len("</tool_call>")], ["f()"]),
        ("<think>" + hermes("f", {}) + "</think>Done.", []),
        (hermes("__import__('os').system", {}), []),
        (hermes("f", {"x=1, y": 2}), []),
        (hermes("lambda", {}), []),
        (hermes("f", [1]), []),
        ("<tool_call>not json</tool_call>", []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", []),
        ("", []),
    ],
)
def test_calls_are_read_and_never_become_other_code(text: str, calls: list[str]):
    assert [str(call) for call in tool_calls(text)] == calls


def test_the_next_prompt_holds_thinking_apart_from_the_answer():
    text = "<think>hm</think>I look. " + hermes("ls", {"a": True})
    message = assistant_message(text, tool_calls(text))
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["function"] == {"name": "ls", "arguments": {"a": True}}


def test_descriptions_become_json_schemas():
    described = {
        "type": "dict",
        "properties": {"x": {"type": "float"}, "xs": {"type": "tuple", "items": {"type": "any"}}},
        "required": ["x"],
    }
    function = tool({"name": "f", "description": "d", "parameters": described, "response": {}})["function"]
    assert set(function) == {"name", "description", "parameters"}
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"] == {
        "x": {"type": "number"},
        "xs": {"type": "array", "items": {"type": "string"}},
    }


def test_a_model_without_a_template_gets_the_conversation_as_text():
    messages = [{"role": "user", "content": "Go."}, assistant_message("On it.", []), {"role": "tool", "content": "ok"}]
    text = as_text(messages, [{"type": "function", "function": {"name": "f"}}])
    assert '{"name": "f"}' in text
    assert text.endswith("User: Go.\n\nAssistant: On it.\n\nTool: ok\n\nAssistant:")
