"""`tah2 study`: post-train every variant from one base, evaluate all at matched compute, and write it up."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tah2.study.layout import Results
    from tah2.study.shop import Shop

DESCRIPTION = """\
Post-train every variant of a study from one base on the same data, evaluate all at matched compute, and write it up.

  tah2 study recipes/studies/demo.yaml                     the README's demo: two variants, minutes
  tah2 study recipes/studies/pocket.yaml --dry-run         what it would do, in FLOPs and time
  tah2 study recipes/studies/pocket.yaml --variants 'tah2-*' standard
  tah2 study recipes/studies/pocket.yaml --only analyse report
  tah2 study recipes/studies/smollm2.yaml data=my/conversations

A study is a YAML file: variants x seeds, what they share, and how they are compared. Its stages are

  base, train, validate, generate, grade     of every unit (a variant with its seeds)
  runtime, analyse, report                   of the study as a whole

Every stage is kept under --out with the digest of what it was made from. What is done is passed over, so the same
command goes on where a killed one stopped, and a change in the file runs again what it changes. Anything in the
file can be overridden with KEY=VALUE.
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tah2 study", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values over the file's")
    parser.add_argument("--out", type=Path, help="where everything goes (default: runs/NAME)")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="run these stages alone")
    parser.add_argument(
        "--variants", nargs="+", default=[], metavar="NAME", help="names or patterns; what they need too"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="units that run at once, one thread each")
    parser.add_argument("--dry-run", action="store_true", help="print the plan with FLOPs and time, and stop")
    parser.add_argument(
        "--publish", type=Path, metavar="DIR", help="also copy the report there, and pack all records but weights"
    )
    parser.add_argument("--json", action="store_true", help="print the plan, or the summary, as JSON")
    arguments = parser.parse_intermixed_args(_split_lists(argv))

    from tah2.cli.recipe import parse_overrides
    from tah2.study.config import load_study
    from tah2.study.plan import plan_study
    from tah2.study.runner import chosen_stages
    from tah2.study.shop import Shop

    study = load_study(arguments.study, parse_overrides(arguments.overrides))
    plan = plan_study(study, arguments.variants)
    out = arguments.out or Path("runs") / arguments.study.stem
    stages = chosen_stages(arguments.only)
    if arguments.dry_run:
        return _dry_run(Shop(out, plan), stages, arguments.json)

    from tah2.study.estimate import estimate
    from tah2.study.runner import Interrupted, run_study
    from tah2.study.screen import StudyScreen

    command = shlex.join(["tah2", "study", *argv])
    screen = StudyScreen(estimate(plan), jobs=max(1, arguments.jobs))
    try:
        shop = run_study(plan, out, screen, jobs=arguments.jobs, stages=stages, command=command)
    except Interrupted as stopped:
        _console().print(f"{stopped} The same command goes on from there.")
        return 130
    if arguments.publish is not None:
        from tah2.study.publish import publish

        publish(shop.root, arguments.publish)
    _show_results(shop, arguments.json)
    return 0


def _split_lists(argv: list[str]) -> list[str]:
    """KEY=VALUE words go first, so that `--only a b KEY=VALUE` does not take them for stages."""
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    return [*overrides_after_file(argv, overrides)]


def overrides_after_file(argv: list[str], overrides: list[str]) -> list[str]:
    rest = [word for word in argv if word not in overrides]
    place = next((i + 1 for i, word in enumerate(rest) if word.endswith((".yaml", ".yml", ".json"))), len(rest))
    return [*rest[:place], *overrides, *rest[place:]]


def _console() -> Console:
    from rich.console import Console

    return Console()


def _dry_run(shop: Shop, stages: frozenset[str], as_json: bool) -> int:
    from tah2.study.show import commands, plan_rows, plan_table, training_rows, training_table

    rows, training, words = plan_rows(shop, stages), training_rows(shop.plan), commands(shop)
    if as_json:
        import json

        print(json.dumps({"plan": rows, "training": training, "commands": words}, indent=2))
        return 0
    console = _console()
    console.print(plan_table(rows))
    if training:
        console.print()
        console.print(training_table(training))
    if words:
        console.print("\nCommands:", style="bold")
        for line in words:
            print(f"  {line}")
    return 0


def _show_results(shop: Shop, as_json: bool) -> None:
    from tah2.study.layout import SUMMARY, load_results

    if not (shop.root / SUMMARY).is_file():
        return
    results = load_results(shop.root)
    if as_json:
        import json

        print(json.dumps(results.summary, indent=2))
        return
    _print_results(results, shop)


def _print_results(results: Results, shop: Shop) -> None:
    from tah2.study.picture import picture
    from tah2.study.show import result_table
    from tah2.study.summary import main_variant

    console, summary = _console(), results.summary
    console.print()
    console.print(result_table(summary))
    if shop.plan.study.picture:
        drawn = picture(results, main_variant(results))
        if drawn is not None:
            console.print()
            console.print(drawn)
    held = sum(claim["holds"] for claim in summary["claims"])
    if summary["claims"]:
        console.print(f"\n{held} of the {len(summary['claims'])} claims that this study can judge hold here.")
    _say_where(console, results, shop.plan.study.next)


def _say_where(console: Console, results: Results, following: Any) -> None:
    pages = sorted((results.root / "report").glob("*.html"))
    for path in (*pages, results.root / "summary.json"):
        console.print(f"Written: {path}", highlight=False, soft_wrap=True)
    if following:
        console.print("\nNext:", style="bold")
        for line in following:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
