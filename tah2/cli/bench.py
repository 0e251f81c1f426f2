"""`tah2 bench`: measure this machine; every ratio is taken side by side, in one run."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

DESCRIPTION = """\
Measure what the loop costs on this machine. Ratios compare contenders that ran in turns on the same weights and data;
close other programs first, and read absolute figures as this machine's alone.

  tah2 bench train                      training steps against Standard's and transformers', time and memory
  tah2 bench train --model qwen3-1.7b   the same of one model on random weights, for a GPU
  tah2 bench decode                     decoding on a CPU against Standard, transformers and the memory's bandwidth
  tah2 bench gpu                        decoding on a GPU, random weights of Qwen3-1.7B's shape
  tah2 bench serve                      16 streams through HTTP against the engine alone
  tah2 bench train --json --out FILE    the same as one JSON object, also written to FILE
"""


class Bench(NamedTuple):
    module: str
    """It has `FULL` and `QUICK` plans, and `measure(plan, threads, say)` that returns a report with `ratios`."""
    help: str


BENCHES = {
    "train": Bench("tah2.bench.train", "time and memory of training steps"),
    "decode": Bench("tah2.bench.decode", "speed of decoding on a CPU"),
    "gpu": Bench("tah2.bench.gpu", "speed of decoding on a GPU"),
    "serve": Bench("tah2.bench.serve", "what the server costs over the engine"),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tah2 bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(BENCHES) + "}")
    for name, bench in BENCHES.items():
        command = commands.add_parser(name, help=bench.help, description=bench.help.capitalize() + ".")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object to FILE too")
        command.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (its own choice by default)")
        command.add_argument("--rounds", type=int, metavar="N", help="timed rounds of each contender")
        sizes = command.add_mutually_exclusive_group()
        sizes.add_argument("--quick", action="store_true", help="tiny sizes: does it run? The figures say nothing")
        if name == "train":
            sizes.add_argument("--model", metavar="NAME", help="this size alone, such as qwen3-1.7b on a GPU")
            command.add_argument("--tokens", type=int, metavar="N", help="tokens of a step with --model (4096)")
    options = parser.parse_args(argv)
    report = _measure(options)
    text = json.dumps(report, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    else:
        _show(report)
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import replace

    if any(given is not None and given < 1 for given in (options.threads, options.rounds)):
        raise ValueError("'--threads' and '--rounds' must be at least 1.")
    bench = importlib.import_module(BENCHES[options.command].module)
    plan = bench.QUICK if options.quick else bench.FULL
    if options.command == "train" and options.model is not None:
        plan = bench.plan_of(options.model, 4096 if options.tokens is None else options.tokens)
    elif options.command == "train" and options.tokens is not None:
        raise ValueError("'--tokens' belongs to '--model': the other sizes have tokens of their own.")
    if options.rounds is not None:
        plan = replace(plan, rounds=options.rounds)
    report: dict[str, Any] = bench.measure(plan, options.threads, lambda line: print(line, file=sys.stderr))
    return report


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "target", title=f"{report['machine']['device']}, {report['machine']['threads']} threads")
    table.add_column("measured", justify="right")
    for name, value in report["ratios"].items():
        table.add_row(name.replace("_", " "), report["targets"][name], "missing" if value is None else f"{value:.3f}")
    Console().print(table)
