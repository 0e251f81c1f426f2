"""Tasks: the paper's table, the files as they are, prompts, and rows from the hub in local names."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.evals import sources
from tah2.evals.sources import Source
from tah2.evals.task import GREEDY, SAMPLED, Task
from tah2.evals.tasks import TASKS, register, task_named
from tests.evals.benchmarks_here import FOLDER, problems

PAPER = {
    "aime24": (30, "avg@32"),
    "aime25": (30, "avg@32"),
    "aime26": (30, "avg@32"),
    "amc23": (40, "avg@32"),
    "math500": (500, "avg@4"),
    "olympiadbench": (675, "avg@4"),
    "imo_answerbench": (400, "avg@4"),
    "gpqa": (198, "avg@8"),
    "supergpqa": (7050, "avg@4"),
    "humaneval": (164, "avg@8"),
    "mbpp": (378, "avg@8"),
    "livecodebench_v6": (175, "avg@4"),
    "bfcl_v3": (800, "avg@1 (greedy)"),
}
LOCAL = sorted(set(TASKS) - {"supergpqa"})


@pytest.mark.parametrize("name", PAPER)
def test_counts_and_metrics_are_the_papers(name: str):
    task = task_named(name)
    assert (task.count, task.metric) == PAPER[name]


def test_decoding_defaults_are_the_papers():
    assert vars(SAMPLED) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_tokens": 32768,
        "exit_threshold": 0.5,
    }
    assert all(task.decoding == (GREEDY if task.multi_turn else SAMPLED) for task in TASKS.values())


@pytest.mark.parametrize("name", LOCAL)
def test_every_local_file_is_read_whole(name: str):
    found = problems(name)
    assert len(found) == TASKS[name].count
    assert all(problem.id and problem.text.strip() and problem.messages[0]["content"].strip() for problem in found)
    if not TASKS[name].multi_turn:
        assert all(problem.text == problem.text.rstrip(" ") for problem in found)


@pytest.mark.parametrize("name", ["aime24", "math500", "gpqa", "humaneval", "mbpp", "livecodebench_v6"])
def test_prompts_ask_for_reasoning_and_hold_the_question(name: str):
    problem = problems(name)[0]
    asked = problem.messages[-1]["content"]
    assert len(problem.messages) == 1
    assert "step by step" in asked
    question = problem.data.get("problem") or problem.data.get("question") or problem.data.get("text")
    assert (question or problem.data["prompt"]).strip() in asked
    assert (question or problem.data["prompt"]).strip() in problem.text


def test_math_asks_for_a_box_and_choices_for_a_letter():
    assert "\\boxed{}" in problems("aime24")[0].messages[0]["content"]
    asked = problems("supergpqa_sample")[0].messages[0]["content"]
    assert "Answer: $LETTER" in asked
    assert "\nA) " in asked


def test_prompts_do_not_hold_the_gold_answer():
    for problem in problems("gpqa")[:20]:
        assert "correct_answer" not in problem.messages[0]["content"]
        assert f"Answer: {problem.data['answer']}" not in problem.messages[0]["content"]
    for problem in problems("humaneval")[:20]:
        assert problem.data["canonical_solution"].strip() not in problem.messages[0]["content"]


def test_gpqa_options_are_shuffled_alike_every_time():
    first, again = problems("gpqa"), problems("gpqa")
    letters = [problem.data["answer"] for problem in first]
    assert letters == [problem.data["answer"] for problem in again]
    assert all(letters.count(letter) > 198 / 8 for letter in "ABCD")
    assert all(len(set(problem.data["options"])) >= 3 for problem in first)


def test_gpqa_stays_encrypted_on_disk(tmp_path: Path):
    loaded = task_named("gpqa").load(FOLDER) if (FOLDER / "gpqa_diamond.jsonl.zip").is_file() else pytest.skip()
    stored = (FOLDER / "gpqa_diamond.jsonl.zip").read_bytes()
    assert loaded.problems[0].data["question"][:40].encode() not in stored
    (tmp_path / "gpqa_diamond.jsonl.zip").write_bytes(stored)
    task_named("gpqa").load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gpqa_diamond.jsonl.zip"]


def test_scores_say_what_is_special_about_the_data():
    caveats = {name: " ".join(TASKS[name].load(FOLDER).provenance()["caveats"]) for name in LOCAL if problems(name)}
    assert "public tests only" in caveats["livecodebench_v6"]
    assert "2025.8.6.2" in caveats["bfcl_v3"]
    assert "2026.3.23" in caveats["bfcl_v4"]
    assert "not SuperGPQA Hard" in caveats["supergpqa_sample"]
    assert caveats["aime24"] == ""


def test_a_part_of_a_benchmark_is_called_a_part(tmp_path: Path):
    rows = [{"id": f"a{number}", "problem": "1 + 1?", "answer": "2"} for number in range(3)]
    (tmp_path / "aime24.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = task_named("aime24").load(tmp_path)
    assert loaded.provenance()["caveats"] == ["3 of 30 problems"]
    assert loaded.provenance()["origin"] == "aime24.jsonl"


def test_lines_end_at_newlines_alone(tmp_path: Path):
    row = {"id": "a", "problem": "one\u2028two\x85three", "answer": "2"}
    (tmp_path / "aime24.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert "one\u2028two\x85three" in task_named("aime24").problems(tmp_path)[0].text


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "aime24.jsonl").write_text(json.dumps({"id": "a", "problem": "?", "answer": "2"}))
    monkeypatch.setenv("TAH2_BENCHMARKS", str(tmp_path))
    assert [problem.id for problem in task_named("aime24").problems()] == ["a"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{not json", "aime24.jsonl:1 is not JSON"),
        ("[1]", "holds list, not an object"),
        ('{"id": "a", "problem": "?"}\n{"id": "a", "problem": "?"}', "repeats the id"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path: Path, content: str, complaint: str):
    (tmp_path / "aime24.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        task_named("aime24").problems(tmp_path)


def test_mistakes_are_explained(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean 'math500'"):
        task_named("math50")
    with pytest.raises(ConfigError, match="does not exist"):
        task_named("aime24").problems(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"supergpqa_sample\.jsonl is not in"):
        task_named("supergpqa_sample").problems(tmp_path)
    with pytest.raises(ConfigError, match="registered already"):
        register(task_named("aime24"))
    aime = vars(task_named("aime24")) | {"decoding": GREEDY}
    with pytest.raises(ConfigError, match="set repeats to 1"):
        Task(**aime)


HUB: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "aime24": (
        [{"id": 60, "problem": "P", "solution": "S", "answer": "204", "url": "u", "year": 2024}],
        {"id": "aime24-01", "problem": "P", "answer": "204"},
    ),
    "aime25": ([{"problem": "P", "answer": "070", "id": "0"}], {"problem": "P", "answer": "70"}),
    "amc23": ([{"id": 0, "question": "Q", "answer": 27.0, "url": "u"}], {"problem": "Q", "answer": "27"}),
    "math500": (
        [{"problem": "P", "solution": "S", "answer": "\\frac12", "subject": "Algebra", "level": 2, "unique_id": "t/1"}],
        {"id": "t/1", "problem": "P", "answer": "\\frac12", "subject": "Algebra", "level": 2},
    ),
    "olympiadbench": (
        [{"id": 1606, "question": "Q", "final_answer": ["2"], "is_multiple_answer": False, "unit": None}],
        {"id": "olympiadbench-1606", "problem": "Q", "answer": ["2"], "is_multiple_answer": False},
    ),
    "imo_answerbench": (
        [{"Problem ID": "imo-1", "Problem": "P", "Short Answer": "3", "Category": "Algebra"}],
        {"id": "imo-1", "problem": "P", "answer": "3"},
    ),
    "gsm8k": (
        [{"question": "Q", "answer": "so <<1+1=2>>\n#### 1,002"}],
        {"id": "gsm8k-test-0000", "problem": "Q", "answer": "1002"},
    ),
    "gpqa": (
        [
            {
                "Record ID": "rec1",
                "Question": "Q",
                "Correct Answer": "yes",
                "Incorrect Answer 1": "no",
                "Incorrect Answer 2": "nay",
                "Incorrect Answer 3": "nope",
            }
        ],
        {"id": "rec1", "question": "Q"},
    ),
    "supergpqa": (
        [
            {"uuid": "e", "question": "Q", "options": ["a", "b"], "answer_letter": "B", "difficulty": "easy"},
            {"uuid": "h", "question": "Q", "options": ["a", "b"], "answer_letter": "B", "difficulty": "hard"},
        ],
        {"id": "h", "question": "Q", "options": ["a", "b"], "answer": "B"},
    ),
    "humaneval": (
        [
            {
                "task_id": "HumanEval/0",
                "prompt": "def f():\n",
                "entry_point": "f",
                "test": "t",
                "canonical_solution": "c",
            }
        ],
        {"id": "HumanEval/0", "entry_point": "f", "test": "t"},
    ),
    "mbpp": (
        [
            {
                "task_id": 2,
                "code": "def helper(): pass\ndef f(a): return a",
                "prompt": "Write f.",
                "test_imports": [],
                "test_list": ["assert f(1) == 1"],
                "test": "assert f(2) == 2",
            }
        ],
        {"id": "Mbpp/2", "text": "Write f.", "entry_point": "f", "plus_test": "assert f(2) == 2"},
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_rows_from_the_hub_take_local_names(name: str, monkeypatch: pytest.MonkeyPatch):
    import datasets

    rows, expected = HUB[name]
    hub = task_named(name).source.hub
    assert hub is not None

    def load(asked: str, config: str | None = None) -> Any:
        assert (asked, config) == (hub.id, hub.config)
        return datasets.DatasetDict({hub.split: datasets.Dataset.from_list(rows)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.delenv("TAH2_BENCHMARKS", raising=False)
    loaded = task_named(name).load()
    (problem,) = loaded.problems
    assert {key: problem.data[key] for key in expected} == expected
    assert loaded.provenance()["origin"].startswith("hf:" + hub.id)
    if (FOLDER / task_named(name).source.file).is_file():
        local = set(problems(name)[0].data) - {"url", "category", "subcategory", "source", "changed_from_v1", "prompt"}
        optional = {"context", "subfield", "error", "answer_type", "unit", "plus", "solution", "domain", "subdomain"}
        assert local - set(problem.data) - optional == set()


@pytest.fixture
def hub_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, list[Any]]], None]:
    """Puts these files into the repositories of the hub."""
    import huggingface_hub

    def provide(files: Mapping[str, list[Any]]) -> None:
        def download(repository: str, name: str, repo_type: str) -> str:
            assert repo_type == "dataset"
            path = tmp_path / name.replace("/", "_")
            path.write_text("\n".join(json.dumps(row) for row in files[name]))
            return str(path)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.delenv("TAH2_BENCHMARKS", raising=False)

    return provide


def contest_row(private: str) -> dict[str, Any]:
    return {
        "question_title": "T",
        "question_content": "Double it.",
        "platform": "atcoder",
        "question_id": "abc1",
        "contest_id": "abc",
        "contest_date": "2025-02-01T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
        "private_test_cases": private,
        "metadata": "{}",
    }


def test_livecodebench_from_the_hub_has_private_tests(hub_files: Callable[[Mapping[str, list[Any]]], None]):
    secret = json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}])
    hub_files({"test6.jsonl": [contest_row(base64.b64encode(zlib.compress(pickle.dumps(secret))).decode())]})
    loaded = task_named("livecodebench_v6").load()
    assert "public tests only" not in loaded.provenance()["caveats"]
    assert loaded.problems[0].data["public_test_cases"] == [{"input": "1", "output": "2"}]
    assert loaded.problems[0].data["fn_name"] is None


def test_bfcl_from_the_hub_is_joined_from_its_files(hub_files: Callable[[Mapping[str, list[Any]]], None]):
    entry = {"id": "multi_turn_base_0", "question": [[{"role": "user", "content": "Go."}]], "initial_config": {}}
    files: dict[str, list[Any]] = {
        f"{folder}BFCL_v3_multi_turn_{name}.json": []
        for folder in ("", "possible_answer/")
        for name in ("base", "miss_func", "miss_param", "long_context")
    }
    files["BFCL_v3_multi_turn_base.json"] = [{**entry, "involved_classes": ["MathAPI"]}]
    files["possible_answer/BFCL_v3_multi_turn_base.json"] = [{"id": entry["id"], "ground_truth": [["add(a=1,b=2)"]]}]
    from tah2.evals.tasks.tools import CLASSES

    files |= {f"multi_turn_func_doc/{file}.json": [{"name": f"{file}_f"}] for file in CLASSES.values()}
    hub_files(files)
    (problem,) = task_named("bfcl_v3").problems()
    assert problem.data["category"] == "multi_turn_base"
    assert problem.data["ground_truth"] == [["add(a=1,b=2)"]]
    assert problem.data["functions"] == [{"name": "math_api_f"}]


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    import datasets

    def load(*_: Any) -> Any:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConfigError, match=r"Cannot load Idavidrein/gpqa .*no route\)\. It is gated") as caught:
        task_named("gpqa").problems()
    assert "\n" not in str(caught.value)


def test_a_missing_column_is_named():
    with pytest.raises(ConfigError, match="none of the fields problem, question; it has answer"):
        sources.pick({"answer": 1}, "problem", "question")


def test_a_wrong_password_is_one_sentence(tmp_path: Path):
    if not (FOLDER / "gpqa_diamond.jsonl.zip").is_file():
        pytest.skip()
    with pytest.raises(ConfigError, match=r"Cannot read .*password"):
        sources.read_local(Source("gpqa_diamond.jsonl.zip", None, password=b"wrong"), FOLDER)
