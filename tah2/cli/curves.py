"""`tah2 curves`: accuracy against compute, over cutoffs, votes and runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tah2.evals.scaling import RunCurves
    from tah2.evals.scaling_report import ReportConfig, Row

DESCRIPTION = """\
Compare runs at matched compute: responses are cut at a grid of output limits, judged again, and priced again.

  tah2 curves runs/standard runs/tah2-m2
  tah2 curves runs/standard runs/tah2-m2 --cutoffs 4096,8192,16384,32768 --fit-to 16384 --out figures
  tah2 curves runs/m8-at-4 runs/m8-at-8 runs/m8-at-12 --labels 'M=8 at 4,M=8 at 8,M=8 at 12'

Prints accuracy per cutoff, the accuracy gained per doubling of decoding FLOPs with R2, accuracy where the baseline (the
first run) peaks, cons@n, and depth ceilings; with --out also CSV files and figures. Intervals resample problems.
"""


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    cutoffs, at, labels = (_numbers(arguments.cutoffs), _numbers(arguments.at), _words(arguments.labels))
    if labels and len(labels) != len(arguments.runs):
        raise ValueError(f"'--labels' names {len(labels)} runs, but there are {len(arguments.runs)}.")

    from tah2.evals.scaling import run_curves
    from tah2.evals.scaling_report import ReportConfig, comparable

    runs = [_opened(folder, arguments) for folder in arguments.runs]
    limits = [int(cutoff) for cutoff in cutoffs] or _common_grid(runs)
    found: list[RunCurves] = []
    for place, run in enumerate(runs):
        run.manifest.label = labels[place] if labels else run.manifest.label
        found.append(run_curves(run, limits, _tokenizer(run, arguments.tokenizer), arguments.workers))
    compared = comparable(found)
    config = ReportConfig(
        arguments.baseline, arguments.fit_to, tuple(at), arguments.draws, arguments.level, arguments.vote_draws
    )
    report(compared, config, arguments.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tah2 curves", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folders that 'tah2 eval' has written")
    made.add_argument("--cutoffs", default="", metavar="A,B", help="output limits (4K to 32K, as far as runs reach)")
    made.add_argument("--fit-to", type=int, metavar="C", help="fit slopes through cutoffs up to C (default: all)")
    made.add_argument("--at", default="", metavar="F,G", help="compare accuracies at these FLOPs per response too")
    made.add_argument("--baseline", metavar="LABEL", help="the run that others are compared with (the first)")
    made.add_argument("--labels", default="", metavar="A,B", help="names of the runs, in order")
    made.add_argument("--tasks", default="", metavar="A,B", help="only these benchmarks")
    made.add_argument("--data-dir", type=Path, metavar="DIR", help="where the problems came from; else the hub")
    made.add_argument("--tokenizer", metavar="PATH", help="the runs' tokenizer, if their model has moved")
    made.add_argument("--workers", type=int, default=2, metavar="N", help="responses judged at a time (default 2)")
    made.add_argument("--draws", type=int, default=10_000, metavar="N", help="bootstrap draws (default 10000)")
    made.add_argument("--level", type=float, default=0.95, metavar="P", help="of the intervals (default 0.95)")
    made.add_argument("--vote-draws", type=int, metavar="N", help="sample so many draws for cons@n instead of counting")
    made.add_argument("--out", type=Path, metavar="DIR", help="write CSV files and figures there")
    return made


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{text!r} must be numbers, separated by commas.") from None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _opened(folder: Path, arguments: argparse.Namespace) -> Any:
    """The run with the benchmarks that were asked for, or all that can be cut."""
    from tah2.evals.grade_run import GradedRun
    from tah2.evals.scaling import cuttable_tasks

    return GradedRun(folder, arguments.data_dir, _words(arguments.tasks) or cuttable_tasks(folder))


def _common_grid(runs: Sequence[Any]) -> list[int]:
    from tah2.evals.scaling import default_cutoffs, token_limit

    return list(default_cutoffs(min(token_limit(run) for run in runs)))


def _tokenizer(run: Any, named: str | None) -> Any:
    """The run's tokenizer; None if it cannot be found, which matters only if something has to be cut."""
    from transformers import AutoTokenizer

    place = named or next((each["model"] for each in reversed(run.manifest.sessions) if each.get("model")), None)
    if place is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError):
        if named:
            raise ValueError(f"{named} holds no tokenizer.") from None
        return None


def report(runs: Sequence[RunCurves], config: ReportConfig, out: Path | None) -> None:
    from tah2.cli.grade import console_for_tables
    from tah2.evals import scaling_report as tables

    made: dict[str, list[Row]] = {
        "runs": tables.run_rows(runs, config),
        "points": tables.point_rows(runs, config),
        "slopes": tables.slope_rows(runs, config),
        "matched": tables.matched_rows(runs, config),
        "votes": tables.vote_rows(runs, config),
    }
    console = console_for_tables()
    for name, rows in made.items():
        if rows:
            console.print(_table(TITLES[name], _shown(name, rows)))
    overlap = tables.overlap_row(runs)
    if len(runs) > 1 and overlap is None:
        console.print("The runs share no range of compute.")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in made.items():
        if rows:
            tables.write_csv(out / f"{name}.csv", rows)
    from tah2.evals.figures import draw_figures

    figures = draw_figures(runs, config, out)
    console.print(f"{sum(map(bool, made.values()))} tables and {len(figures)} figure files in {out}", markup=False)


TITLES = {
    "runs": "runs at their largest cutoff",
    "points": "accuracy over cutoffs, mean over benchmarks",
    "slopes": "accuracy per doubling of decoding FLOPs",
    "matched": "accuracy at matched compute",
    "votes": "cons@n",
}


def _shown(name: str, rows: Sequence[Row]) -> list[Row]:
    """What fits a screen: means alone, and votes of 1, 2, 4, ..."""
    if name == "points":
        return [row for row in rows if row["task"] == "mean"]
    if name == "votes":
        most = max(row["n"] for row in rows)
        return [row for row in rows if row["n"] == most or not row["n"] & (row["n"] - 1)]
    return list(rows)


def _table(title: str, rows: Sequence[Row]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = [name for name in dict.fromkeys(name for row in rows for name in row) if not name.endswith("_low")]
    names = [name for name in names if not name.endswith("_high")]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="left" if isinstance(rows[0].get(name), str) else "right")
    for row in rows:
        table.add_row(*(_cell(name, row) for name in names))
    return table


def _cell(name: str, row: Row) -> str:
    from tah2.evals.figures import engineering

    value = row.get(name)
    if value is None or value != value:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if name == "flops":
        return engineering(value)
    percent = name in ("accuracy", "gain") or (name not in PLAIN and f"{name}_low" not in row)
    factor = 100 if percent else 1
    text = f"{value * factor:.{1 if percent else 2}f}"
    if f"{name}_low" in row and row[f"{name}_low"] == row[f"{name}_low"]:
        text += f" [{row[f'{name}_low'] * factor:.1f}, {row[f'{name}_high'] * factor:.1f}]"
    return text


PLAIN = ("tokens", "mean_depth", "seconds", "r_squared", "intercept", "flops_per_token_ratio", "points_per_doubling")
"""Columns that are no shares; every other number is an accuracy, shown in percent."""
