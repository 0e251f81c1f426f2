"""What people see: progress in estimated seconds, a table at the end, and a response coloured by depth."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from tah2.study.estimate import Cost
from tah2.study.layout import load_results
from tah2.study.picture import colour_tokens, picture, style_of
from tah2.study.plan import Task
from tah2.study.screen import StudyScreen
from tah2.study.show import result_table
from tah2.study.summary import summarise
from tests.study.synthetic import VARIANTS, synthetic_study


def shown(what: object, width: int = 160) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_time_left_follows_the_pace_of_what_is_done():
    costs = {f"train:{name}": Cost(0.0, 10.0) for name in "abc"}
    screen = StudyScreen(costs, Console(file=StringIO()))
    screen.start(3, 30.0)
    first, second = Task("train", "a"), Task("train", "b")
    screen.begin(first)
    screen.end(first, 20.0, cached=False)
    assert screen.seconds_left() == 40.0
    screen.end(second, 0.0, cached=True)
    assert screen.seconds_left() == 20.0
    screen.share(Task("train", "c"), 0.5)
    assert screen.seconds_left() == 10.0
    screen.jobs = 2
    assert screen.seconds_left() == 5.0


def test_without_a_terminal_every_stage_is_a_line():
    out = StringIO()
    screen = StudyScreen({"train:a": Cost(0.0, 1.0), "grade:a": Cost(0.0, 1.0)}, Console(file=out))
    screen.start(2, 2.0)
    screen.end(Task("train", "a"), 3.0, cached=False)
    screen.end(Task("grade", "a"), 0.0, cached=True)
    screen.close()
    assert out.getvalue().splitlines() == [
        "[1/2] train:a  3.0 s  ETA 0:03",
        "2 of 2 stages done, 1 of them made before",
    ]


def test_tokens_wear_the_colour_of_their_depth():
    line = colour_tokens(["a", "b", "c"], [1, 2, 9])
    assert line.plain == "a b c "
    assert [str(span.style) for span in line.spans] == [style_of(1), style_of(2), style_of(9)]
    assert style_of(1) != style_of(2) != style_of(9) == style_of(5)


def test_the_picture_is_of_a_right_answer_that_goes_deep(tmp_path: Path):
    results = load_results(synthetic_study(tmp_path, VARIANTS[:1] + VARIANTS[8:9]))
    text = shown(picture(results, "tah2-m2"))
    assert "TaH2 M=2 answers" in text
    assert "depth:  1   2" in text
    problem = text.split("answers ")[1].split(":")[0]
    assert any(row.correct for row in results.of("tah2-m2")[0].grades if row.problem == problem)


def test_the_table_sets_accuracy_beside_compute(tmp_path: Path):
    summary = summarise(load_results(synthetic_study(tmp_path, VARIANTS[:1] + VARIANTS[8:9])))
    text = shown(result_table(summary))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "1.00x" in lines["Standard"]
    row = next(row for row in summary["variants"] if row["name"] == "tah2-m2")
    assert f"{100 * row['accuracy']:.1f}%" in lines["TaH2 M=2"]
    (matched,) = [row for row in summary["matched_compute"] if row["name"] == "tah2-m2"]
    assert f"{100 * matched['accuracy']:.1f}% ({100 * matched['gain']:+.1f}" in lines["TaH2 M=2"]
