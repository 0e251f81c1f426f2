"""`tah2 sft`: post-train a model as a recipe says."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Post-train a model as a recipe says, on this machine or, through torchrun, on many.

  tah2 sft recipes/laptop/chase-tah2.yaml
  tah2 sft recipes/laptop/chase-tah2.yaml loop.max_depth=4 out=runs/chase-m4
  torchrun --nproc-per-node 8 -m tah2 sft recipes/paper/1.7b-tah2-m2.yaml

A recipe is a YAML file; it may extend others ('extends: base.yaml'). Anything in it can be overridden with
KEY=VALUE or --key VALUE. The folder 'out' receives metrics.jsonl, checkpoints that the same command resumes
from, summary.json and, at the end, the model as a Hugging Face folder. SIGTERM and Ctrl-C stop the run after the
current step with a checkpoint, and exit code 0.
"""

FLAGS = ("--show", "-h", "--help")
"""May stand anywhere on the command line; every other word behind the recipe is an override."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tah2 sft", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="a YAML recipe")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help="values over the recipe's")
    parser.add_argument("--show", action="store_true", help="print the whole recipe as it would run, and stop")
    words = [word for word in argv if word not in FLAGS]
    arguments = parser.parse_args([*(word for word in argv if word in FLAGS), *words])
    from tah2.cli.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    recipe.setdefault("out", str(Path("runs") / arguments.recipe.stem))

    from tah2.config.strict import build, plain
    from tah2.train.config import TrainConfig

    config = build(TrainConfig, recipe)
    if arguments.show:
        import yaml

        print(yaml.safe_dump(plain(config), sort_keys=False), end="")
        return 0

    from tah2.train.health import NonFiniteLoss
    from tah2.train.trainer import train

    try:
        summary = train(config)
    except NonFiniteLoss as error:
        raise ValueError(str(error)) from error
    return 0 if summary["status"] in ("finished", "interrupted") else 1
