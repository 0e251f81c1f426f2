"""`tah2 analyze`: what a looped checkpoint does with its iterations, on data of one's own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tah2.study.analyses.inputs import Subject
    from tah2.study.analyses.run import Ask

DESCRIPTION = """\
What a looped checkpoint does with its iterations, under teacher forcing on data of your own.

  gains      does looping every token pay? loss of each token after the first and after the final iteration
  alignment  does the decider know? gain of a further pass against continue probability
  depths     which tokens take how many iterations, token by token and by kind of token
  attention  which iterations' keys are read by queries at the last iteration, head by head
"""
EPILOG = """\
examples:
  tah2 analyze depths runs/demo/model --data pocket
  tah2 analyze gains out/ouro --data conversations.jsonl --samples 50 --out runs/gains
  tah2 analyze alignment out/tah2 --data recipes/laptop/chase-tah2.yaml --json

data: JSONL or Parquet conversations (a file, a folder or a hub id), a token store (.npz), the validation set of a
training recipe (.yaml), or a procedural task by name (pocket, stop-chase, pointer-chase).
"""
SUMMARIES = {
    "gains": "Loss reduction of every token from the first to the final iteration, all tokens running all of them.",
    "alignment": "Mean gain of a further pass by continue probability, with bootstrap intervals over documents.",
    "depths": "Maps of responses, tokens coloured by depth, and depths by kind of token and place in the response.",
    "attention": "Attention mass by iteration of the keys, for queries at the last iteration, and maps of three heads.",
}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    from tah2.study.analyses.inputs import DataChoice, open_subject
    from tah2.study.analyses.run import analyse

    choice = DataChoice(options.data, options.samples, options.max_tokens, options.batch_tokens, options.seed)
    subject = open_subject(options.model, choice, options.device)
    found, maps = _with_bar(options, subject, analyse)
    if options.out is not None:
        _write(options.command, found, maps, options.out)
    if options.json:
        print(json.dumps(found))
    else:
        from tah2.cli.analyze_show import show

        show(options.command, found)
        if options.out is not None:
            print(f"written to {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tah2 analyze",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(SUMMARIES) + "}")
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(
            name, description=summary, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("model", metavar="MODEL", help="a looped checkpoint: folder or hub id")
        command.add_argument("--data", required=True, metavar="DATA", help="what to run over; see below")
        command.add_argument("--samples", type=int, default=200, metavar="N", help="at most N documents (200)")
        command.add_argument(
            "--max-tokens", type=int, default=4096, metavar="N", help="leave longer documents out (4096)"
        )
        command.add_argument("--batch-tokens", type=int, default=8192, metavar="N", help="tokens per batch (8192)")
        command.add_argument("--seed", type=int, default=0, help="of a procedural task's problems (0)")
        command.add_argument("--device", default="cpu", help="where the model runs (cpu)")
        command.add_argument("--out", type=Path, metavar="DIR", help="write JSON, CSV and figures here")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "depths":
            command.add_argument("--maps", type=int, default=3, metavar="N", help="responses to show (3)")
        if name == "attention":
            command.add_argument(
                "--positions", type=int, default=128, metavar="N", help="response positions of the maps (128)"
            )
    return parser


def _with_bar(options: argparse.Namespace, subject: Subject, analyse: Any) -> tuple[dict[str, Any], Any]:
    """The result and, for attention, its maps; a bar on stderr meanwhile."""
    from tempfile import TemporaryDirectory

    import numpy as np
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tah2.study.analyses.run import ANALYSES, MAPS, Ask

    columns = (TextColumn(options.command), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    total = len(subject.store.ids) * ANALYSES[options.command].passes
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar, TemporaryDirectory() as folder:
        task = bar.add_task("", total=total, rate="")

        def progress(tokens: int) -> None:
            bar.advance(task, tokens)
            speed = bar.tasks[0].speed
            bar.update(task, rate="" if not speed else f"{speed:,.0f} tokens/s")

        ask = _ask(Ask, options, progress, Path(folder))
        found = analyse(options.command, subject, ask)
        path = Path(folder) / MAPS
        return found, np.load(path)["maps"] if path.is_file() else None


def _ask(kind: type[Ask], options: argparse.Namespace, progress: Any, folder: Path) -> Ask:
    if min(getattr(options, "positions", 1), 1) < 1 or getattr(options, "maps", 0) < 0:
        raise ValueError("'--positions' must be at least 1 and '--maps' at least 0.")
    return kind(
        tokens_per_batch=options.batch_tokens,
        maps=getattr(options, "maps", 0),
        positions=getattr(options, "positions", 1),
        progress=progress,
        folder=folder,
    )


def _write(name: str, found: dict[str, Any], maps: Any, out: Path) -> None:
    from tah2.study.report.single import write_analysis

    write_analysis(name, found, maps, out)
