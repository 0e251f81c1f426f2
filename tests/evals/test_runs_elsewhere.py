"""Samples from servers, from several processes, and from conversations with an environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tah2.evals import episode as episodes
from tah2.evals.cutoffs import cut
from tah2.evals.episode import Ask
from tah2.evals.flops import FlopsModel
from tah2.evals.manifest import RunManifest
from tah2.evals.records import ERROR, RecordFile, SampleRecord, same_samples
from tah2.evals.run import evaluate, samples_path
from tah2.evals.run_conversation import Call, Conversation
from tah2.evals.run_plan import Prompts, Sample
from tah2.evals.task import Decoding, Problem
from tests.engine.tiny import byte_tokenizer
from tests.evals.fake_server import FakeServer, Reply, normal
from tests.evals.toy import asked, save_model, save_problems
from tests.server.process import ServerProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_problems(tmp_path_factory.mktemp("data"), 3)


def records(out: Path, task: str = "gsm8k") -> list[SampleRecord]:
    return RecordFile(samples_path(out, task)).read()


@pytest.mark.slow
def test_our_server_gives_the_records_of_the_engine(model: Path, data: Path, tmp_path: Path):
    evaluate(asked(model, data, tmp_path / "here"))
    server = ServerProcess(model)
    try:
        config = asked(model, data, tmp_path / "there", endpoint=f"{server.url}/v1", in_flight=4, engine={})
        summary = evaluate(config)
    finally:
        assert server.stop() == 0
    assert (summary.generated, summary.failed) == (9, 0)
    there = records(tmp_path / "there")
    assert same_samples(there, records(tmp_path / "here"))
    assert all(record.seconds for record in there)


def test_any_server_will_do_without_a_local_model(data: Path, tmp_path: Path):
    def script(body: dict[str, Any], tried: int) -> Reply | None:
        said = normal(body, "the answer is \\boxed{2}")
        for choice in said["choices"]:
            choice["message"]["reasoning_content"] = "hm"
        return Reply(body=said)

    with FakeServer(script) as server:
        config = asked(None, data, tmp_path / "out", endpoint=server.url, engine={})
        assert evaluate(config).failed == 0
        seen = server.seen[0]
    assert (seen["temperature"], seen["top_p"], seen["top_k"], seen["max_tokens"]) == (0.6, 0.95, 20, 12)
    assert len({body["seed"] for body in server.seen}) == 9
    found = records(tmp_path / "out")
    assert found[0].text == "<think>\nhm\n</think>\n\nthe answer is \\boxed{2}"
    assert found[0].decode_flops is None
    assert evaluate(config).generated == 0


def test_a_refused_request_is_one_failed_sample(data: Path, tmp_path: Path):
    def script(body: dict[str, Any], tried: int) -> Reply | None:
        return Reply(400, {"error": {"message": "too long"}}) if "1 + 1" in str(body["messages"]) else None

    with FakeServer(script) as server:
        config = asked(None, data, tmp_path / "out", endpoint=server.url, engine={})
        assert evaluate(config).failed == 3
    failed = [record for record in records(tmp_path / "out") if record.finish_reason == ERROR]
    assert {record.problem for record in failed} == {"gsm8k-1"}
    assert "too long" in failed[0].extra["error"]


@pytest.mark.slow
def test_several_processes_make_the_records_of_one(model: Path, data: Path, tmp_path: Path):
    evaluate(asked(model, data, tmp_path / "one"))
    config = asked(model, data, tmp_path / "two")
    engine = config.engine | {"max_num_seqs": 2}
    assert evaluate(dataclasses.replace(config, workers=2, engine=engine)).generated == 9
    assert same_samples(records(tmp_path / "one"), records(tmp_path / "two"))


def guessing(task: Any, problem: Problem) -> Generator[Ask, str | None, dict[str, Any]]:
    """Three answers, each behind a longer conversation."""
    said: list[str] = []
    messages: list[dict[str, Any]] = [dict(message) for message in problem.messages]
    for step in range(3):
        text = yield Ask(list(messages), [{"type": "function", "function": {"name": "guess"}}])
        if text is None:
            return {"turns": said, "ending": "length"}
        said.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"wrong {step}"}]
    return {"turns": said, "ending": "done"}


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> str:
    """`gsm8k` as a conversation."""
    from tah2.evals import tasks

    monkeypatch.setattr(episodes, "episode", guessing)
    monkeypatch.setitem(tasks.TASKS, "gsm8k", dataclasses.replace(tasks.TASKS["gsm8k"], multi_turn=True))
    return "gsm8k"


def test_conversations_share_the_engine_and_are_reproducible(model: Path, data: Path, tmp_path: Path, game: str):
    evaluate(asked(model, data, tmp_path / "many"))
    config = asked(model, data, tmp_path / "one")
    evaluate(dataclasses.replace(config, engine=config.engine | {"max_num_seqs": 1}))
    found = records(tmp_path / "many")
    assert same_samples(found, records(tmp_path / "one"))
    manifest = RunManifest.read(tmp_path / "many")
    flops = FlopsModel(manifest.backbone, manifest.loop, manifest.model["max_depth"])  # type: ignore[arg-type]
    for record in found:
        calls = record.extra["calls"]
        assert len(calls) == len(record.extra["turns"]) == 3
        assert sum(call["tokens"] for call in calls) == len(record.token_ids) == len(record.depths)
        assert record.decode_flops == sum(call["decode_flops"] for call in calls)
        start = 0
        for call in calls:
            depths = record.depths[start : start + call["tokens"]]
            assert int(flops.of_beginnings(call["prompt_depth_counts"], depths)[-1]) == call["decode_flops"]
            start += call["tokens"]
    with pytest.raises(ValueError, match="cannot be cut"):
        cut(found[0], 1, str, None)


def test_a_conversation_that_outgrows_the_model_ends_as_its_task_says(
    model: Path, data: Path, tmp_path: Path, game: str
):
    config = asked(model, data, tmp_path, max_tokens=60, n=1, chat="off")
    evaluate(dataclasses.replace(config, engine=config.engine | {"max_model_len": 420}))
    assert {record.extra["ending"] for record in records(tmp_path)} == {"length"}
    assert {record.finish_reason for record in records(tmp_path)} == {"length"}


def sample(multi_turn: bool = True) -> Sample:
    problem = Problem("p", ({"role": "user", "content": "?"},), "?", {})
    return Sample("gsm8k", problem, 0, 1, Decoding(), (), multi_turn)


def test_an_error_ends_a_conversation_as_an_error(game: str):
    conversation = Conversation(sample())
    assert conversation.answer(Call("a", "stop", token_ids=[1], depths=[1]))
    assert not conversation.answer(Call("", ERROR, extra={"error": "the engine broke"}))
    record = conversation.record()
    assert (record.finish_reason, record.extra["error"]) == (ERROR, "the engine broke")
    first = Conversation(sample())
    first.refuse("the prompt is too long")
    assert first.record().finish_reason == ERROR


def test_tools_reach_models_whose_template_knows_none():
    tokenizer = byte_tokenizer()
    tools = [{"type": "function", "function": {"name": "cd", "parameters": {}}}]
    messages = [{"role": "user", "content": "go"}]
    plain = Prompts(tokenizer, "off", {})
    assert '"cd"' in tokenizer.decode(plain.of_conversation(messages, tools))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    try:
        assert '"cd"' in tokenizer.decode(Prompts(tokenizer, "on", {}).of_conversation(messages, tools))
        tokenizer.chat_template = "{{ tools[0].function.name }}" + tokenizer.chat_template
        assert tokenizer.decode(Prompts(tokenizer, "on", {}).of_conversation(messages, tools)) == "cd<go>"
    finally:
        tokenizer.chat_template = None


@pytest.mark.slow
def test_workers_of_a_ray_cluster_make_the_records_of_one_process(model: Path, data: Path, tmp_path: Path):
    ray = pytest.importorskip("ray")
    evaluate(asked(model, data, tmp_path / "one", n=1))
    try:
        assert evaluate(asked(model, data, tmp_path / "cluster", n=1, ray=True, workers=2)).generated == 3
    finally:
        ray.shutdown()
    assert same_samples(records(tmp_path / "one"), records(tmp_path / "cluster"))
