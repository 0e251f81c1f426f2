"""`tah2 distill`: let a teacher answer the prompts of data sets, and write training data."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Let a teacher answer the prompts of data sets, and write the answers that pass as training data for `tah2 sft`.

  tah2 distill recipes/distill/paper.yaml teacher.endpoint.url=http://teacher:8000/v1
  tah2 distill recipes/distill/laptop.yaml out=runs/distilled

A recipe is a YAML file; it may extend others ('extends: base.yaml'). Anything in it can be overridden with
KEY=VALUE or --key VALUE. The folder 'out' receives answers.jsonl (every answer as it came), train.jsonl,
validation.jsonl and report.json. An interrupted run goes on when the same command is run again; a changed filter
is applied to the answers that are there, and nobody is asked twice.
Exit code 1: prompts are left that the teacher did not answer; run the command again to ask for them.
"""

FLAGS = ("--show", "-h", "--help")
"""May stand anywhere on the command line; every other word behind the recipe is an override."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tah2 distill", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="a YAML recipe")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help="values over the recipe's")
    parser.add_argument("--show", action="store_true", help="print the whole recipe as it would run, and stop")
    words = [word for word in argv if word not in FLAGS]
    arguments = parser.parse_args([*(word for word in argv if word in FLAGS), *words])

    from tah2.config.recipe import load_recipe
    from tah2.config.strict import build, plain
    from tah2.distill.config import DistillConfig

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    recipe.setdefault("out", str(Path("runs") / f"distill-{arguments.recipe.stem}"))
    config = build(DistillConfig, recipe)
    if arguments.show:
        import yaml

        print(yaml.safe_dump(plain(config), sort_keys=False), end="")
        return 0

    from tah2.cli.distill_progress import ProgressWatch
    from tah2.distill.run import distill

    with ProgressWatch() as watch:
        report = distill(config, watch)
    print("\n".join(report.lines()))
    print(f"{config.out}: train.jsonl, validation.jsonl, report.json")
    return 1 if report.missing_answers else 0
