"""The pages `docs/add-a-task.md` and `docs/graders.md` are true: their code runs as it stands there."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tah2.config.strict import ConfigError
from tah2.evals.graders import GRADERS, grade, grade_many
from tah2.evals.task import Problem, Task
from tah2.evals.tasks import TASKS, import_extensions, task_named

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "add-a-task.md").read_text(encoding="utf-8")
MODULE, USE, SANDBOXED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(ROWS,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Somebody with the page's files in a folder; afterwards no trace of them is left."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "backwards.jsonl").write_text(ROWS)
    (tmp_path / "backwards.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(SANDBOXED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tasks, graders = dict(TASKS), dict(GRADERS)
    yield tmp_path
    for name in ("backwards", "program"):
        sys.modules.pop(name, None)
    TASKS.clear()
    TASKS.update(tasks)
    GRADERS.clear()
    GRADERS.update(graders)


def test_the_page_adds_a_task_that_grades(reader: Path, capsys: pytest.CaptureFixture[str]):
    exec(compile(USE, "add-a-task.md", "exec"), {})
    said = capsys.readouterr().out
    assert "Spell the word 'stressed' backwards." in said
    assert "avg@4 Grade(correct=1.0, note='', answer='desserts'" in said
    task = task_named("backwards")
    assert task.load("benchmarks").provenance()["caveats"] == []
    assert grade(task, task.problems("benchmarks")[1], "Answer: drawer").correct == 0


def test_the_variable_makes_it_known_to_a_fresh_process(reader: Path):
    program = "from tah2.evals.tasks import task_named; print(len(task_named('backwards').problems()))"
    environment = {**os.environ, "TAH2_TASKS": "backwards.py", "TAH2_BENCHMARKS": "benchmarks"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "2\n"


def test_a_grader_of_ones_own_runs_in_the_sandbox(reader: Path):
    exec(compile(MODULE, "backwards.py", "exec"), {})
    import_extensions(str(reader / "program.py"))
    task = dataclasses.replace(task_named("backwards"), name="programs", grader="program")
    problem = Problem("p", (), "", {"answer": 42})
    programs = ["answer = 6 * 7", "answer = 41", "open('/etc/passwd').read()", "while True: pass"]
    grades = grade_many(task, [(problem, program) for program in programs])
    assert [grade.correct for grade in grades] == [1.0, 0.0, 0.0, 0.0]
    assert "FileNotFoundError" in grades[2].note
    assert grades[3].note == "stopped: out of time"


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"TAH2_TASKS names .*absent\.py, which is no file"):
        import_extensions(str(tmp_path / "absent.py"))


def test_the_page_names_every_field_of_a_task():
    cells = re.findall(r"^\| (`[^|]*`) \|", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == {field.name for field in dataclasses.fields(Task)}


def test_the_pages_name_every_grader_and_task():
    graders = (DOCS / "graders.md").read_text(encoding="utf-8")
    assert [name for name in GRADERS if f"`{name}`" not in PAGE] == []
    assert [name for name in TASKS if f"`{name}`" not in graders] == []


def test_the_example_of_the_sandbox_runs(capsys: pytest.CaptureFixture[str]):
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "graders.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "graders.md", "exec"), {})
    assert "done 45" in capsys.readouterr().out
