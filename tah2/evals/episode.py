"""Playing a multi-turn problem: user turns, tool calls run in simulated back ends, results, until the model is done.

Whoever plays supplies the answers; nothing here knows where they come from. The calls of a conversation are run again
from its start at every step, in a fresh room, so no state outlives a step and an episode is a function of what was
said in it. The checker does the same once more.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tah2.evals.graders.grading import grader_of, sandbox_for
from tah2.evals.graders.responses import END_OF_THINKING
from tah2.evals.sandbox import BUSY, Limits, Sandbox
from tah2.evals.task import Problem, Task

MOST_STEPS = 20
"""Answers in one turn; an episode that needs more has failed."""
STEP = Limits(wall_seconds=BUSY * 20, cpu_seconds=20, processes=8)
"""For the calls of a step and all before it, which take milliseconds unless an argument is absurd."""
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
"""What the user says in a turn in which functions appear that were withheld."""
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
Respond = Callable[[Messages, Tools], str | None]
"""The next answer to a conversation, or None where there is no room for one."""


class Ask(NamedTuple):
    """What to answer next."""

    messages: Messages
    tools: Tools


Playing = Generator[Ask, str | None, dict[str, Any]]


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        """As Python, which is how back ends and checker take it."""
        return f"{self.name}({','.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@dataclass
class Story:
    """What has happened so far.

    `turns[turn][step]` holds call strings, steps without calls left out. Only an `ending` of "done" can be right.
    """

    turns: list[list[list[str]]] = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    ending: str = "done"
    """ "done", "steps" (too many in one turn) or "length" (no room to go on)."""
    answers: int = 0

    def extra(self) -> dict[str, Any]:
        """What a sample record keeps for the grader."""
        return {"turns": self.turns, "ending": self.ending, "answers": self.answers}


def play(task: Task, problem: Problem, respond: Respond) -> dict[str, Any]:
    """One episode, with answers from `respond`; returns what a sample record keeps in `extra`."""
    playing = episode(task, problem)
    answer: str | None = None
    try:
        ask = next(playing)
        while True:
            answer = respond(*ask)
            ask = playing.send(answer)
    except StopIteration as end:
        return dict(end.value)


def episode(task: Task, problem: Problem) -> Playing:
    """Yields what to answer, is sent the answers, and returns what a sample record keeps in `extra`.

    None in place of an answer says that there is no room for one.
    """
    sandbox = sandbox_for(grader_of(task).name)
    story = Story()
    offered, later = functions_of(problem.data)
    for turn, said in enumerate(problem.data["question"]):
        offered = offered + later.get(turn, [])
        story.messages += said or [{"role": "user", "content": MORE_FUNCTIONS}]
        story.turns.append([])
        goes_on = yield from _turn(story, problem, [tool(function) for function in offered], sandbox)
        if not goes_on:
            break
    return story.extra()


def _turn(story: Story, problem: Problem, tools: Tools, sandbox: Sandbox) -> Generator[Ask, str | None, bool]:
    """Returns whether the episode goes on: the model has answered without a call, within `MOST_STEPS` calls."""
    for _ in range(MOST_STEPS + 1):
        text = yield Ask(list(story.messages), tools)
        if text is None:
            story.ending = "length"
            return False
        story.answers += 1
        calls = tool_calls(text)
        story.messages.append(assistant_message(text, calls))
        if not calls:
            return True
        story.turns[-1].append([str(call) for call in calls])
        results = run_calls(problem, [step for turn in story.turns for step in turn], sandbox)
        for call, result in zip(calls, results, strict=True):
            story.messages.append({"role": "tool", "name": call.name, "content": result})
    story.ending = "steps"
    return False


def run_calls(problem: Problem, steps: Sequence[Sequence[str]], sandbox: Sandbox) -> list[str]:
    """What the calls of the last step return."""
    entry = {name: problem.data[name] for name in ("id", "category", "initial_config", "involved_classes")}
    request = {"entry": entry, "steps": steps}
    outcome = sandbox.call("tah2.evals.graders.inside.tools:execute", request, STEP)
    if outcome.ending == "done":
        return [str(result) for result in outcome.reply]
    return [f"Error during execution: {outcome.ending}"] * len(steps[-1])


def functions_of(row: Mapping[str, Any]) -> tuple[list[Any], dict[int, list[Any]]]:
    """Functions offered from the start, and turn -> functions that appear then."""
    missed = row.get("missed_function") or {}
    later = {int(turn): [f for f in row["functions"] if f["name"] in names] for turn, names in missed.items()}
    withheld = {function["name"] for functions in later.values() for function in functions}
    return [function for function in row["functions"] if function["name"] not in withheld], later


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function's description as chat templates and endpoints take it."""
    shown = {name: function[name] for name in ("name", "description")}
    return {"type": "function", "function": {**shown, "parameters": json_schema(function["parameters"])}}


TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "bool": "boolean", "any": "string"}
"""Names of types in BFCL's descriptions -> in JSON schemas."""


def json_schema(described: Any) -> Any:
    if isinstance(described, list):
        return [json_schema(entry) for entry in described]
    if not isinstance(described, Mapping):
        return described
    schema = {key: json_schema(value) for key, value in described.items()}
    if isinstance(schema.get("type"), str):
        schema["type"] = TYPES.get(schema["type"], schema["type"])
    return schema


def tool_calls(text: str) -> list[Call]:
    """The Hermes calls of an answer, in order; what is not a call with a proper name is left out."""
    found = TOOL_CALL.findall(text.rsplit(END_OF_THINKING, 1)[-1])
    return [call for content in found if (call := parsed_call(content)) is not None]


def parsed_call(content: str) -> Call | None:
    """JSON, or the Python literal that small models write instead. Names become code later, so they are checked."""
    value: Any = None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(content)
            break
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
    if not isinstance(value, dict) or not _is_name(value.get("name")):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict) or not all(_is_name(key) for key in arguments):
        return None
    return Call(value["name"], arguments)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)


def assistant_message(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """An answer as the next prompt holds it: thinking apart, so that a template can leave it out of later turns."""
    thinking, _, answer = text.rpartition(END_OF_THINKING)
    content = TOOL_CALL.sub("", answer).strip() if calls else answer.strip()
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = thinking.split("<think>", 1)[-1].strip()
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": f"call_{number}",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
    return message


def as_text(messages: Messages, tools: Tools) -> str:
    """The conversation as plain text, for a model without a chat template."""
    listed = "\n".join(json.dumps(entry["function"]) for entry in tools)
    lines = [
        "You may call these functions, described in JSON, one line each:",
        listed,
        'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>. When all is done, say so.',
    ]
    for message in messages:
        calls = "".join(
            f"\n<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls", ())
        )
        lines.append(f"{message['role'].capitalize()}: {message['content']}{calls}")
    return "\n\n".join([*lines, "Assistant:"])
