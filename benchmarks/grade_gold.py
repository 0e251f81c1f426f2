"""Grade gold answers (all must be right) and corrupted ones (all must be wrong) of every benchmark at hand.

    python benchmarks/grade_gold.py --data-dir FOLDER [--tasks math500,bfcl_v3] [--workers 2] [--every 10]

LiveCodeBench publishes no gold programs; programs that answer by table take their place.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tah2.config.strict import ConfigError
from tah2.evals.graders import grade_many
from tah2.evals.graders.grader import GRADER_FAILED
from tah2.evals.task import Grade
from tah2.evals.tasks import TASKS, task_named

from tests.evals.gold import corrupted_response, gold_response  # isort: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with the benchmark files (default: TAH2_BENCHMARKS)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names with commas between; all by default")
    parser.add_argument("--workers", type=int, default=1, help="sandboxed processes at a time")
    parser.add_argument("--every", type=int, default=1, help="take every n-th problem only")
    options = parser.parse_args(arguments)
    failed = False
    print(f"{'task':18} {'problems':>8} {'gold':>8} {'corrupted':>10} {'seconds':>8}")
    for name in options.tasks.split(","):
        task = task_named(name)
        try:
            problems = task.problems(options.data_dir)[:: options.every]
        except ConfigError as error:
            print(f"{name:18} absent: {error}")
            continue
        started = time.monotonic()
        gold = grade_many(task, [(p, gold_response(task, p)) for p in problems], options.workers)
        wrong = grade_many(task, [(p, corrupted_response(task, p)) for p in problems], options.workers)
        seconds = time.monotonic() - started
        right = [sum(grade.correct for grade in grades) / len(problems) for grades in (gold, wrong)]
        print(f"{name:18} {len(problems):8} {right[0]:8.2%} {right[1]:10.2%} {seconds:8.1f}", flush=True)
        for problem, of_gold, of_wrong in zip(problems, gold, wrong, strict=True):
            bad = [str(value) for value, expected in ((of_gold, 1), (of_wrong, 0)) if not all_parts(value, expected)]
            if bad:
                failed = True
                print(f"  {problem.id}: {'; '.join(bad)}")
    return int(failed)


def all_parts(grade: Grade, expected: float) -> bool:
    """Whether the verdict and every part of it are what they must be, and come from a grader that worked."""
    verdicts = [grade.correct, *grade.parts.values()]
    return all(verdict == expected for verdict in verdicts) and not grade.note.startswith(GRADER_FAILED)


if __name__ == "__main__":
    sys.exit(main())
