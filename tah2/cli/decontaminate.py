"""`tah2 decontaminate`: find rows of data sets that hold problems of the benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Compare training data with the evaluation benchmarks: which rows hold one of their problems?

  tah2 decontaminate data/ --data-dir benchmarks/                    a report
  tah2 decontaminate data/*.jsonl --data-dir benchmarks/ --out clean/    and the clean rows under the same names

A row holds a problem when a user or system message of it (or one line of it) is the whole problem, or shares a run
of 13 words with it. Runs of numbers and runs that many problems share prove nothing and do not count. Without
--data-dir, the folder in TAH2_BENCHMARKS or else the Hugging Face hub is read.
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tah2 decontaminate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", metavar="DATA", help="JSONL or Parquet files, folders or patterns")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder with local copies of the benchmarks")
    parser.add_argument("--benchmarks", default="all", metavar="NAMES", help="names between commas; 'all' by default")
    parser.add_argument("--words", type=int, default=13, metavar="N", help="length of a shared run (13)")
    parser.add_argument("--responses", action="store_true", help="look into assistant and tool messages too")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write clean rows and report.json there")
    parser.add_argument("--json", action="store_true", help="print the whole report as one JSON object")
    options = parser.parse_args(argv)
    if options.words < 2:
        raise ValueError(f"'--words' must be at least 2, not {options.words}.")

    import json

    from tah2.cli.distill_progress import counting
    from tah2.distill.benchmarks import open_benchmarks
    from tah2.distill.decontaminate import decontaminate

    names = [name.strip() for name in options.benchmarks.split(",") if name.strip()]
    compared = open_benchmarks(names, options.data_dir, options.words)
    with counting("comparing rows") as watch:
        report = decontaminate(options.data, compared, options.out, options.responses, watch)
    text = json.dumps(report.to_dict(), indent=2)
    if options.out is not None:
        (options.out / "report.json").write_text(text + "\n", encoding="utf-8")
    print(text if options.json else "\n".join(report.lines()))
    return 0
