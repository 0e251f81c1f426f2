"""Planted contamination is found and named, clean rows stay, boilerplate proves nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tah2.cli import main
from tah2.distill.benchmarks import open_benchmarks, problem_texts
from tah2.distill.contamination import Benchmarks, ProblemText, is_prose, overlaps, words_of
from tah2.distill.run import distill
from tah2.evals.tasks import TASKS
from tests.data.conftest import write_lines
from tests.distill.recipes import config, question, rows_of
from tests.evals.fake_server import FakeServer

SHARED = Path(__file__).resolve().parents[3] / "shared"
REAL = pytest.mark.skipif(not (SHARED / "benchmarks").is_dir(), reason="needs the copies of the benchmarks")

LONG = "A train leaves the old station at noon and meets another train that left the harbour one hour before it."
SHORT = "Find $\\sin 30^\\circ$ exactly."
SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def index(*texts: str, **options: Any) -> Benchmarks:
    return Benchmarks([ProblemText("b", str(i), text) for i, text in enumerate(texts)], **options)


def test_a_shared_run_of_thirteen_words_is_an_overlap_and_twelve_are_none():
    words = LONG.split()
    found = index(LONG).find("Now: " + " ".join(words[3:16]).upper() + "!")
    assert found is not None
    assert (found.kind, found.problem, found.shared) == ("overlap", "0", " ".join(words[3:16]).lower())
    assert index(LONG).find("Now: " + " ".join(words[3:15])) is None


def test_a_short_problem_is_found_as_a_whole_text_or_line_alone():
    problems = index(SHORT)
    for text in (SHORT, SHORT.upper(), SHORT + SUFFIX, "Question:\n" + SHORT):
        hit = problems.find(text)
        assert hit is not None
        assert (hit.kind, hit.shared) == ("equal", "find sin 30 circ exactly")
    assert problems.find("I must find sin 30 circ exactly today") is None
    assert problems.find(SUFFIX) is None


def test_a_turn_of_a_conversation_is_no_whole_problem():
    turns = Benchmarks([ProblemText("b", "0", "Yes, please.", whole=False), ProblemText("b", "0", LONG, whole=False)])
    assert turns.find("Yes, please.") is None
    assert turns.find(LONG) is not None


def test_runs_that_many_problems_share_are_boilerplate_and_copies_of_a_text_count_once():
    frame = "The input is given from standard input in the following format which is shown below"
    own = [f"{' '.join(f'word{i}x{j}' for j in range(3))} . {frame}" for i in range(6)]
    assert index(*own[:5]).find(frame) is not None
    assert index(*own).find(frame) is None
    assert index(*[LONG] * 9).find(LONG[:-3]) is not None


def test_numbers_and_single_letters_are_nobodys_problem():
    sequence = " ".join(str(i) for i in range(20))
    problems = index("Continue this sequence of numbers: " + sequence)
    assert problems.find("Sort: " + sequence) is None
    assert not is_prose(["f", "x", "2", "is", "is"] * 3)


def test_chinese_is_compared_by_character():
    problem = "一列火车中午从旧车站出发，一小时后遇到另一列火车。"
    assert words_of("火车 ab12") == ["火", "车", "ab12"]
    assert index(problem).find("请看：" + problem[2:18]) is not None
    assert index(problem).find("请看：" + problem[2:10]) is None


WORDS = st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta", "x", "1"]), max_size=14).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(text=WORDS, problems=st.lists(WORDS, max_size=4), run=st.integers(2, 5))
def test_the_index_agrees_with_its_plain_twin(text: str, problems: list[str], run: int):
    parts = [ProblemText("b", str(i), problem, whole=False) for i, problem in enumerate(problems)]
    found = Benchmarks(parts, run, boilerplate=99).find(text)
    assert (found is not None) == any(overlaps(text, problem, run) for problem in problems)


def test_an_empty_index_finds_nothing():
    assert Benchmarks([]).find(LONG) is None
    assert index("").find("") is None


@REAL
def test_a_problem_of_every_benchmark_is_found_wherever_it_is_planted():
    compared = open_benchmarks(data_dir=SHARED / "benchmarks")
    assert len(compared.problems) >= 14
    picks = random.Random(0)
    for name in compared.problems:
        rows = TASKS[name].load(SHARED / "benchmarks").rows
        for row in picks.sample(list(rows), 12):
            texts = [part.text for part in problem_texts(TASKS[name], row)]
            prompts = [f"Solve this.\n\n{text}{SUFFIX}" for text in texts]
            assert any(compared.index.find(prompt) for prompt in prompts), (name, row["id"])


@REAL
def test_the_real_data_hold_no_benchmark_problem_and_planted_rows_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    problem = TASKS["aime24"].load(SHARED / "benchmarks").rows[3]
    hidden = TASKS["gpqa"].load(SHARED / "benchmarks").rows[5]
    clean = (SHARED / "data" / "mbpp_train.jsonl").read_bytes()
    planted = [question(problem["problem"] + SUFFIX), question("Also: " + hidden["question"])]
    lines = [json.dumps(row).encode() + b"\n" for row in planted]
    (tmp_path / "mixed.jsonl").write_bytes(lines[0] + clean + lines[1] + b"{torn")
    arguments = ["--data-dir", str(SHARED / "benchmarks"), "--out", str(tmp_path / "clean")]
    assert main(["decontaminate", str(tmp_path / "mixed.jsonl"), *arguments]) == 0
    assert (tmp_path / "clean" / "mixed.jsonl").read_bytes() == clean
    said = capsys.readouterr().out
    assert "2 hold one of their problems" in said
    assert hidden["question"][:60] not in said
    text = (tmp_path / "clean" / "report.json").read_text(encoding="utf-8")
    found = json.loads(text)["benchmarks"]
    assert [match["problem"] for match in found["aime24"]["matches"]] == [problem["id"]]
    assert set(found["gpqa"]["matches"][0]) == {"where", "id", "problem", "kind"}
    assert found["gpqa"]["matches"][0]["where"].endswith("mixed.jsonl:259")
    assert json.loads(text)["unreadable"][0].startswith(f"{tmp_path / 'mixed.jsonl'}:260: not JSON")


@REAL
def test_distillation_asks_no_benchmark_problem(tmp_path: Path):
    problem = TASKS["math500"].load(SHARED / "benchmarks").rows[0]
    rows = [question("mine"), question(problem["problem"])]
    wanted = {"data_dir": str(SHARED / "benchmarks"), "benchmarks": ["math500", "aime24"]}
    with FakeServer() as server:
        report = distill(config(tmp_path, rows, server.url, decontaminate=wanted))
    assert [body["messages"][0]["content"] for body in server.seen] == ["mine"]
    assert dict(report.dropped) == {"in benchmark math500": 1}
    assert report.contamination["benchmarks"]["math500"]["matches"][0]["problem"] == problem["id"]
    assert [row["id"] for row in rows_of(tmp_path / "out")] == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--benchmarks", "aime42"], "did you mean 'aime"),
        (["--data-dir", "nowhere"], "does not exist"),
        (["--words", "1"], "at least 2"),
        ([], "no benchmark in"),
        (["--benchmarks", "aime24", "--out", "."], "would overwrite"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", [question("a")])
    row = {"id": "x", "problem": LONG, "answer": "1"}
    write_lines(tmp_path / "aime24.jsonl", [row]) if "--benchmarks" in arguments else None
    (tmp_path / "empty").mkdir()
    folder = [] if "--data-dir" in arguments else ["--data-dir", "." if "--benchmarks" in arguments else "empty"]
    assert main(["decontaminate", "a.jsonl", *folder, *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert complaint in said
    assert "\n" not in said
