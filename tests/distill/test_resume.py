"""A run killed at any moment and started again gives the rows of an uninterrupted one, and asks nobody twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tah2.config.strict import ConfigError, plain
from tah2.distill.book import AnswerBook
from tah2.distill.config import DistillConfig
from tah2.distill.run import distill
from tests.distill.recipes import config, question, rows_of
from tests.evals.fake_server import FakeServer, Reply

ROWS = [question(f"question {i}") for i in range(60)]


def files_of(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in ("train.jsonl", "validation.jsonl")}


def command(setup: DistillConfig, tmp_path: Path) -> list[str]:
    recipe = tmp_path / f"{setup.out.name}.yaml"
    recipe.write_text(yaml.safe_dump(plain(setup)), encoding="utf-8")
    return [sys.executable, "-m", "tah2", "distill", str(recipe)]


def seeds_asked(server: FakeServer) -> Counter[int]:
    return Counter(body["seed"] for body in server.seen)


def test_killed_runs_that_go_on_equal_an_uninterrupted_one(tmp_path: Path):
    with FakeServer(lambda body, tried: Reply(delay=0.02)) as server:
        whole = config(tmp_path, ROWS, server.url, held_out=4)
        distill(whole)
        server.seen.clear()
        broken = config(tmp_path, ROWS, server.url, held_out=4, out=str(tmp_path / "broken"))
        for stop_after in (7, 30):
            run = subprocess.Popen(command(broken, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while len(server.seen) < stop_after and run.poll() is None:
                time.sleep(0.005)
            run.send_signal(signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL
            assert not (broken.out / "train.jsonl").exists()
        finished = subprocess.run(command(broken, tmp_path), capture_output=True, text=True, check=True)
    assert "60 prompts read, 60 kept, 0 dropped" in finished.stdout
    assert files_of(broken.out) == files_of(whole.out)
    in_flight = 4
    assert sum(seeds_asked(server).values()) <= len(ROWS) + 2 * in_flight, "only what was in flight is asked again"


@pytest.mark.parametrize("keep", [0.0, 0.35, 0.999])
def test_a_torn_last_line_is_asked_again(tmp_path: Path, keep: float):
    with FakeServer() as server:
        setup = config(tmp_path, ROWS[:8], server.url)
        distill(setup)
        rows, book = files_of(setup.out), setup.out / "answers.jsonl"
        lines = book.read_bytes().splitlines(keepends=True)
        book.write_bytes(b"".join(lines[:5]) + lines[5][: int(len(lines[5]) * keep)])
        server.seen.clear()
        distill(setup)
    assert len(server.seen) == 3
    assert files_of(setup.out) == rows
    assert len(book.read_bytes().splitlines()) == 8


def test_what_failed_is_asked_again_by_the_next_run(tmp_path: Path):
    def script(body: dict[str, Any], tried: int) -> Reply | None:
        text = body["messages"][0]["content"]
        faults = {} if healed.is_set() else {"question 2": Reply(503), "question 3": Reply(422)}
        return faults.get(text)

    healed = threading.Event()
    with FakeServer(script) as server:
        setup = config(tmp_path, ROWS[:6], server.url)
        first = distill(setup)
        healed.set()
        server.seen.clear()
        second = distill(setup)
    assert (first.missing_answers, dict(first.dropped)) == (1, {"not answered yet": 1, "refused by the teacher": 1})
    assert (second.missing_answers, second.dropped.total()) == (0, 0)
    assert {body["messages"][0]["content"] for body in server.seen} == {"question 2", "question 3"}
    assert [row["id"] for row in rows_of(setup.out)] == [f"question-{i}" for i in range(6)]


def test_a_sample_that_is_missing_is_said_and_asked_for_again(tmp_path: Path):
    with FakeServer(lambda body, tried: Reply(503) if len(server.seen) == 1 else None) as server:
        changes = {"sampling": {"samples": 2}, "teacher": {"endpoint": {"retries": 0, "in_flight": 1}}}
        setup = config(tmp_path, ROWS[:1], server.url, **changes)
        first, second = distill(setup), distill(setup)
    assert (first.kept.total(), first.missing_answers) == (1, 1)
    assert (second.kept.total(), second.missing_answers) == (1, 0)
    assert len(server.seen) == 3


def test_requests_that_the_server_refuses_throughout_stop_the_run(tmp_path: Path):
    with FakeServer(lambda body, tried: Reply(400, {"error": {"message": "unknown field top_k"}})) as server:
        with pytest.raises(ConfigError, match=r"Nothing but refusals so far: .*unknown field top_k"):
            distill(config(tmp_path, ROWS, server.url))
        assert len(server.seen) < 30
        server.script = lambda body, tried: None
        assert distill(config(tmp_path, ROWS, server.url)).kept.total() == len(ROWS)


def test_options_that_are_off_are_not_sent(tmp_path: Path):
    with FakeServer() as server:
        distill(config(tmp_path, ROWS[:1], server.url, sampling={"top_k": 0, "extra": {"seed": None, "logprobs": 1}}))
    (body,) = server.seen
    assert not {"top_k", "min_p", "seed"} & set(body)
    assert body["logprobs"] == 1


def test_exit_code_1_says_that_answers_are_missing(tmp_path: Path):
    with FakeServer(lambda body, tried: Reply(503)) as server:
        setup = config(tmp_path, ROWS[:2], server.url)
        run = subprocess.run(command(setup, tmp_path), capture_output=True, text=True)
    assert run.returncode == 1
    assert "2  not answered yet" in run.stdout


def test_more_prompts_and_other_filters_ask_for_what_is_new_alone(tmp_path: Path):
    with FakeServer() as server:
        distill(config(tmp_path, ROWS[:4], server.url))
        server.seen.clear()
        report = distill(config(tmp_path, ROWS[2:7], server.url, filter={"max_tokens": 5}))
    assert sorted(body["messages"][0]["content"] for body in server.seen) == [f"question {i}" for i in (4, 5, 6)]
    assert dict(report.dropped) == {"longer than max_tokens": 5}


def test_two_processes_never_write_to_one_book(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    with AnswerBook(path), pytest.raises(ConfigError, match="Another process is writing"), AnswerBook(path):
        pass
    with AnswerBook(path) as book:
        book.append({"key": "k", "sample": 0, "x": "ü\u2028"})
        assert book.read(("k", 0)) == {"key": "k", "sample": 0, "x": "ü\u2028"}
        assert book.read(("k", 1)) is None


def test_a_line_that_is_no_answer_is_named(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"key": "k", "sample": 0}) + "\n{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"Line 2 of .* is not an answer"), AnswerBook(path):
        pass
    assert os.path.getsize(path) > 0
