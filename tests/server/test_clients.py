"""Other clients, unmodified: lm-evaluation-harness, litellm, LangChain. Skipped where they are not installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tests.server.process import ServerProcess

USER: Any = [{"role": "user", "content": "Which city?"}]
SCHEMA: dict[str, Any] = {
    "title": "city",
    "description": "A city",
    "type": "object",
    "properties": {"name": {"enum": ["Oslo", "Rome"]}},
    "required": ["name"],
    "additionalProperties": False,
}
CHOICES = [" yes", " no", " it might"]
TASK = """\
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITING = """\
task: tiny_writing
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
generation_kwargs: {until: ["never"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of the harness over a local file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"Question {n}: is it so?", "choices": CHOICES, "label": n % 3} for n in range(4)]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "choices.yaml").write_text(TASK % json.dumps(str(folder / "rows.json")))
    (folder / "writing.yaml").write_text(WRITING % json.dumps(str(folder / "rows.json")))
    return folder


def evaluate(
    model: str, arguments: dict[str, Any], tasks: Path, task: str, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Any:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        **more,
    )


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["remote", "huggingface"])
def test_the_harness_scores_choices_as_the_engine_does(
    server: ServerProcess, offline: LLM, checkpoint: Path, tasks: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    arguments = {
        "model": "tiny", "base_url": f"{server.url}/v1/completions", "num_concurrent": 2, "max_length": 1000,
        "tokenizer_backend": tokenizer, "tokenizer": str(checkpoint), "tokenized_requests": True,
    }  # fmt: skip
    result = evaluate("local-completions", arguments, tasks, "tiny_choices", monkeypatch, batch_size=1)
    samples = result["samples"]["tiny_choices"]
    assert len(samples) == 4
    for sample in samples:
        for choice, (loglikelihood, greedy) in zip(
            CHOICES, [r[0] if isinstance(r[0], (list, tuple)) else r for r in sample["filtered_resps"]], strict=True
        ):
            expected = score(offline, sample["doc"]["question"], choice)
            assert float(loglikelihood) == pytest.approx(expected[0], abs=1e-3)
            assert str(greedy) == str(expected[1])


def score(llm: LLM, text: str, choice: str) -> tuple[float, bool]:
    """The log-likelihood of `choice` after `text`, and whether it is what greedy decoding writes."""
    before, ids = llm.tokenizer.encode(text), llm.tokenizer.encode(text + choice)
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    rows = [(row[token], max(entry.logprob for entry in row.values())) for row, token in
            zip(output.prompt_logprobs[len(before) :], ids[len(before) :], strict=True) if row is not None]  # fmt: skip
    return sum(own.logprob for own, _ in rows), all(own.logprob == best for own, best in rows)


@pytest.mark.slow
def test_the_harness_chats(server: ServerProcess, tasks: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = {"model": "tiny", "base_url": f"{server.url}/v1/chat/completions", "num_concurrent": 2}
    result = evaluate(
        "local-chat-completions", arguments, tasks, "tiny_writing", monkeypatch, apply_chat_template=True, batch_size=1
    )
    for sample in result["samples"]["tiny_writing"]:
        question = [{"role": "user", "content": sample["doc"]["question"]}]
        truth = server.post("/v1/chat/completions", messages=question, max_tokens=8, temperature=0)
        assert sample["resps"][0][0] == truth["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_litellm(server: ServerProcess):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    litellm = pytest.importorskip("litellm")
    body: Any = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "messages": USER}
    body |= {"temperature": 0, "max_tokens": 10}
    whole = litellm.completion(**body)
    chunks = list(litellm.completion(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    tool = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    named = {"type": "function", "function": {"name": "pick"}}
    called = litellm.completion(**{**body, "max_tokens": 100}, tools=[tool], tool_choice=named, reasoning_effort="none")
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["name"] in ("Oslo", "Rome")


@pytest.mark.slow
def test_langchain(server: ServerProcess):
    pytest.importorskip("langchain_openai")
    from langchain_openai import ChatOpenAI

    made = ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=100,
        reasoning_effort="none",
    )  # type: ignore[arg-type]
    whole = made.invoke("Which city?")
    assert "".join(str(chunk.content) for chunk in made.stream("Which city?")) == whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    picked = made.with_structured_output(SCHEMA, method="json_schema").invoke("Which city?")
    assert picked["name"] in ("Oslo", "Rome")
    called = made.bind_tools(
        [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}], tool_choice="pick"
    )
    assert called.invoke("Which city?").tool_calls[0]["args"]["name"] in ("Oslo", "Rome")
