"""The local engine as teacher, graders as filters, and the rows in the hands of `tah2 sft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tah2.cli import main
from tah2.config.strict import ConfigError
from tah2.data.config import DataConfig, SourceConfig
from tah2.data.dataset import load_data
from tah2.distill.run import distill
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tests.distill.recipes import config, question, rows_of
from tests.evals.fake_server import FakeServer, Reply, normal
from tests.train.runs import recipe as training_recipe

ROWS = [question(f"what is {i}") for i in range(6)]


def local(tmp_path: Path, student: Path, rows: list[Any], **changes: Any) -> Any:
    engine = {"model": str(student), "in_flight": 3, "options": {"kv_slots": 2048, "kernels": "off"}}
    teacher = {"endpoint": None, "engine": engine}
    drawn = {"max_tokens": 12, "extra": {"min_tokens": 2, "stop": ["a", "e", "1"], "include_stop_str_in_output": True}}
    settings = {"teacher": teacher, "sampling": drawn, "filter": {"tokenizer": str(student)}}
    return config(tmp_path, rows, **(settings | changes))


def test_the_local_engine_answers_as_it_answers_alone(tmp_path: Path, student: Path):
    report = distill(local(tmp_path, student, ROWS, filter={"tokenizer": ""}))
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_bytes().splitlines()]
    assert report.missing_answers == 0
    assert len(answers) == 6
    alone = LLM(student, kv_slots=2048, kernels="off")
    by_seed = {answer["seeds"][0]: answer for answer in answers}
    texts = {answer["messages"][-1]["content"] for answer in answers}
    for seed in sorted(by_seed)[:2]:
        answer = by_seed[seed]
        number = next(i for i, key in enumerate(plan_keys(tmp_path)) if key == answer["key"])
        stop = {"min_tokens": 2, "stop": ["a", "e", "1"], "include_stop_str_in_output": True}
        drawn = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=12, seed=seed, **stop)  # type: ignore[arg-type]
        (again,) = alone.chat([{"role": "user", "content": f"what is {number}"}], drawn)
        assert again.outputs[0].text == answer["messages"][-1]["content"]
        assert (answer["completion_tokens"], answer["prompt_tokens"]) == (
            len(again.outputs[0].token_ids),
            len(again.prompt_token_ids),
        )
    assert len(texts) > 1


def plan_keys(tmp_path: Path) -> list[str]:
    from tah2.distill.prompts import PromptReader, read_prompt

    reader = PromptReader([SourceConfig(path=str(tmp_path / "prompts.jsonl"))])
    return [read_prompt(source, raw).key for _, source, raw in reader.rows()]


def test_prompts_that_the_engine_refuses_are_dropped_alone(tmp_path: Path, student: Path):
    report = distill(local(tmp_path, student, [*ROWS, question("long " * 300)]))
    assert report.dropped["refused by the teacher"] == 1
    assert report.missing_answers == 0


def test_lengths_are_those_that_training_counts_and_the_rows_load(tmp_path: Path, student: Path, tokenizer):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [question("one"), question("many words " * 20), question("call", tools=tools)]
    with FakeServer() as server:
        settings = {"filter": {"tokenizer": str(student), "max_tokens": 120}}
        report = distill(config(tmp_path, rows, server.url, **settings))
    assert dict(report.dropped) == {"longer than max_tokens": 1}
    made = rows_of(tmp_path / "out")
    source = SourceConfig(path=str(tmp_path / "out" / "train.jsonl"))
    data = load_data(DataConfig((source,), max_tokens=120, validation_samples=0), tokenizer)
    assert data.store.lengths.tolist() == [row["provenance"]["tokens"] for row in made]
    assert (data.report.total.bad, data.report.total.kept) == (0, 2)
    assert report.tokens == int(data.store.lengths.sum())


def test_tah2_sft_trains_on_what_tah2_distill_wrote(tmp_path: Path, student: Path):
    def script(body: dict[str, Any], tried: int) -> Reply | None:
        return Reply(body=normal(body, "cut", "length")) if body["messages"][-1]["content"] == "what is 2" else None

    with FakeServer(script) as server:
        distill(config(tmp_path, ROWS, server.url))
    changes = {"model": {"path": str(student)}, "procedural": None, "budget": {"steps": 2}, "loop": None}
    data = {"sources": [{"path": str(tmp_path / "out" / "train.jsonl")}], "validation_samples": 1}
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(json.dumps(training_recipe(tmp_path / "sft", changes, {"data": data})), encoding="utf-8")
    assert main(["sft", str(recipe)]) == 0
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished"


@pytest.mark.parametrize(("policy", "kept"), [("drop", ["right"]), ("keep", ["right", "nobody-knows"])])
def test_only_right_answers_are_kept_and_verdicts_are_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, kept: list[str]
):
    pytest.importorskip("math_verify")
    rows = [question("right", gold="4"), question("wrong", gold="5"), question("nobody knows")]
    with FakeServer(lambda body, tried: Reply(body=normal(body, "So \\boxed{4}."))) as server:
        grade = {"task": "gsm8k", "columns": {"answer": "gold"}, "ungraded": policy}
        setup = config(tmp_path, rows, server.url, filter={"grade": grade})
        report = distill(setup)
        made = rows_of(tmp_path / "out")
        monkeypatch.setattr("tah2.evals.graders.grade_many", lambda *_, **__: pytest.fail("graded twice"))
        distill(setup)
    assert [row["id"] for row in made] == kept
    assert report.dropped["graded wrong"] == 3 - len(kept)
    assert made[0]["provenance"]["graded"]["by"] == "gsm8k"
    assert rows_of(tmp_path / "out") == made


def test_an_unknown_grader_is_named_before_anything_is_asked(tmp_path: Path):
    with FakeServer() as server:
        setup = config(tmp_path, ROWS, server.url, filter={"grade": {"task": "gsm9k"}})
        with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
            distill(setup)
    assert server.seen == []
