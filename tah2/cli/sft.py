"""`tah2 sft`: post-train a model as a recipe says."""

from __future__ import annotations

from tah2.cli.recipe import RecipeCall, print_config

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


def main(argv: list[str]) -> int:
    call = RecipeCall("tah2 sft", DESCRIPTION, argv)
    from tah2.train.config import TrainConfig

    config = call.config(TrainConfig, out=f"runs/{call.path.stem}")
    if call.show:
        return print_config(config)

    from tah2.train.health import NonFiniteLoss
    from tah2.train.trainer import train

    try:
        summary = train(config)
    except NonFiniteLoss as error:
        raise ValueError(str(error)) from error
    return 0 if summary["status"] in ("finished", "interrupted") else 1
