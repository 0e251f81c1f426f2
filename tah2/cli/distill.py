"""`tah2 distill`: let a teacher answer the prompts of data sets, and write training data."""

from __future__ import annotations

from tah2.cli.recipe import RecipeCall, print_config

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


def main(argv: list[str]) -> int:
    call = RecipeCall("tah2 distill", DESCRIPTION, argv)
    from tah2.distill.config import DistillConfig

    config = call.config(DistillConfig, out=f"runs/distill-{call.path.stem}")
    if call.show:
        return print_config(config)

    from tah2.cli.distill_progress import ProgressWatch
    from tah2.distill.run import distill

    with ProgressWatch() as watch:
        report = distill(config, watch)
    print("\n".join(report.lines()))
    print(f"{config.out}: train.jsonl, validation.jsonl, report.json")
    return 1 if report.missing_answers else 0
