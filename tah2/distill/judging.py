"""Answers -> rows, or the reason why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tah2.config.strict import ConfigError, plain
from tah2.data.conversation import Conversation
from tah2.data.report import BadRow
from tah2.data.template import Renderer
from tah2.distill.config import RECORDED, DistillConfig
from tah2.distill.episode import answer_text, calls_of
from tah2.distill.prompts import Prompt

FINISHED = frozenset({"stop", "tool_calls", "function_call", "eos"})

Verdict = tuple[bool, str]
"""Of a grader: right or not, and a note."""


class Rejected(Exception):
    """An answer that becomes no row: `reason` is a short category, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Row:
    """One line of the training data."""

    prompt: Prompt
    values: dict[str, Any]
    tokens: int | None


class Judge:
    """Applies `config.filter`; it needs no teacher, so filters can change after the answers have come."""

    def __init__(self, config: DistillConfig) -> None:
        self.config = config
        self.renderer = None if not config.filter.tokenizer else Renderer(load_tokenizer(config.filter.tokenizer))

    def rows(
        self, prompt: Prompt, answers: Sequence[Mapping[str, Any]], verdicts: Sequence[Verdict | None]
    ) -> list[Row]:
        """The rows of one prompt; raises the first answer's `Rejected` where no answer passes."""
        passed: list[Row] = []
        first: Rejected | None = None
        for answer, verdict in zip(answers, verdicts, strict=True):
            try:
                passed.append(self.row(prompt, answer, verdict))
            except Rejected as rejected:
                first = first or rejected
        if not passed:
            assert first is not None
            raise first
        if self.config.filter.choose == "all":
            return passed
        if self.config.filter.choose == "shortest":
            return [min(passed, key=lambda row: row.tokens or 0)]
        return passed[:1]

    def row(self, prompt: Prompt, answer: Mapping[str, Any], verdict: Verdict | None) -> Row:
        check_answer(answer, self.config.filter.min_characters)
        if verdict is not None and not verdict[0]:
            raise Rejected("graded wrong", verdict[1])
        tokens = self._tokens(prompt, answer)
        if tokens is not None and tokens > self.config.filter.max_tokens:
            raise Rejected("longer than max_tokens", f"{tokens:,} tokens")
        sample = int(answer["sample"])
        values: dict[str, Any] = {
            "id": prompt.id if self.config.filter.choose != "all" else f"{prompt.id}#{sample}",
            "messages": [*prompt.messages, *answer["messages"]],
        }
        if prompt.tools:
            values["tools"] = list(prompt.tools)
        values["provenance"] = self._provenance(prompt, answer, verdict, tokens)
        return Row(prompt, values, tokens)

    def _tokens(self, prompt: Prompt, answer: Mapping[str, Any]) -> int | None:
        """As `tah2 sft` will count them, or else as the teacher counted."""
        if self.renderer is None:
            before, written = answer["prompt_tokens"], answer["completion_tokens"]
            return None if before is None or written is None else before + written
        conversation = Conversation((*prompt.messages, *answer["messages"]), prompt.tools)
        try:
            sample = self.renderer.render(conversation).sample
        except BadRow as problem:
            raise Rejected(problem.reason, str(problem)) from problem
        if not sample.supervised_tokens:
            raise Rejected("no token to train on", "the chat template renders no assistant turn that it asked for")
        return len(sample)

    def _provenance(
        self, prompt: Prompt, answer: Mapping[str, Any], verdict: Verdict | None, tokens: int | None
    ) -> dict[str, Any]:
        sampling = plain(self.config.sampling)
        recorded, teacher = answer["model"] == RECORDED, self.config.teacher
        named = "" if recorded and not teacher.recorded else teacher.name
        found: dict[str, Any] = {
            "teacher": named or answer["model"] or teacher.asked,
            "source": prompt.source,
            "source_id": prompt.id,
            "prompt": prompt.key,
            "finish_reason": answer["finish_reason"],
            "tokens": tokens,
        }
        if not recorded:
            drawn = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "extra", "template_arguments")
            found["sampling"] = {name: sampling[name] for name in drawn if sampling[name] != {}}
            found |= {
                "seeds": answer["seeds"],
                "sample": answer["sample"],
                "completion_tokens": answer["completion_tokens"],
            }
        if answer["replayed"]:
            found["replayed_tool_results"] = answer["replayed"]
        if verdict is not None:
            found["graded"] = {"by": self.config.filter.grade and self.config.filter.grade.task, "note": verdict[1]}
        return found


def check_answer(answer: Mapping[str, Any], min_characters: int) -> None:
    """Refuse what no student should learn from, before any tokenizer or grader looks at it."""
    if answer["finish_reason"] == "length":
        raise Rejected("truncated", f"after {answer['completion_tokens']} tokens")
    if answer["finish_reason"] not in FINISHED:
        raise Rejected("not finished", f"it ended with {answer['finish_reason']!r}")
    for message in answer["messages"]:
        if message["role"] != "assistant":
            continue
        said = answer_text(message)
        calls = calls_of(message)
        if calls is None:
            raise Rejected("malformed tool call", said[-80:])
        if "<think>" in said:
            raise Rejected("unfinished thinking", said[-80:])
        if not calls and len(said) < max(1, min_characters):
            raise Rejected("empty", "no text behind the thinking" if message["content"] else "")


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"Cannot load the tokenizer {name!r} of 'filter.tokenizer': {reason}") from error
