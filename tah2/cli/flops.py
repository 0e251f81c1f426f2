"""`tah2 flops`: what a loop costs in parameters, per decoded token and to train."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from tah2.config.backbone import BackboneConfig
    from tah2.config.loop import LoopConfig

DESCRIPTION = """\
What a loop costs, from its description alone: no weights are read.

  params   parameters of the backbone and of each part that the loop adds
  decode   matrix-product FLOPs per decoded token
  train    matrix-product FLOPs of a training run
  table    the paper's published numbers beside ours

A backbone is a preset (qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, smollm2-135m) or a folder with a config.json:
a Hugging Face checkpoint of the Qwen3, Qwen2 or Llama family, or a looped checkpoint, whose loop is then the default.
"""
EXAMPLES = {
    "params": "tah2 flops params --backbone qwen3-4b --loop tah2 --json",
    "decode": "tah2 flops decode --backbone qwen3-1.7b --loop tah2 --max-depth 2 --continue 0.1925 --mean-keys 15691",
    "train": (
        "tah2 flops train --backbone qwen3-1.7b --loop tah2 --max-depth 2 --continue 0.449 "
        "--tokens 3.3e9 --mean-keys 3406"
    ),
    "table": "tah2 flops table",
}
SUMMARIES = {
    "params": "Count the parameters of the backbone and of each part that the loop adds.",
    "decode": "Expected FLOPs per decoded token, the LM head and attention included.",
    "train": (
        "Expected training FLOPs. Forward and backward is three forwards. Labels are a no-gradient lookahead: "
        "label_paper re-runs every token of a depth, label_actual only those that stopped."
    ),
    "table": "Print the paper's published numbers beside ours.",
}
CONTINUE_HELP = (
    "fraction of ALL tokens that reach depth 2, 3, .. M: M - 1 numbers, or none where all run to the ceiling"
)
MEAN_KEYS_HELP = "mean context length over tokens, each token itself included: the keys that a Standard decoder sees"


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    report = {"params": _params, "decode": _decode, "train": _train, "table": _table}[options.command](options)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tah2 flops",
        description=DESCRIPTION,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{params,decode,train,table}")
    made = {}
    for name, summary in SUMMARIES.items():
        made[name] = commands.add_parser(name, description=summary, epilog=f"example: {EXAMPLES[name]}")
        made[name].add_argument("--json", action="store_true", help="print one JSON object")
    for name in ("params", "decode", "train"):
        _add_model(made[name])
    for name in ("decode", "train"):
        made[name].add_argument(
            "--continue", dest="fractions", type=float, nargs="+", default=[], metavar="F", help=CONTINUE_HELP
        )
        made[name].add_argument("--mean-keys", type=float, required=True, metavar="KEYS", help=MEAN_KEYS_HELP)
    made["train"].add_argument("--tokens", type=float, required=True, metavar="N", help="training tokens, e.g. 3.3e9")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", required=True, metavar="NAME|FOLDER", help="preset or folder with a config.json")
    parser.add_argument(
        "--loop", metavar="KIND", help="standard, tah2, tah2-fixed, ouro, ouro-adaptive, huginn or a registered kind"
    )
    parser.add_argument("--max-depth", type=int, metavar="M", help="depth ceiling")
    parser.add_argument(
        "--set", dest="extra", action="append", default=[], metavar="KEY=VALUE", help="any other option of the loop"
    )


def _model(options: argparse.Namespace) -> tuple[BackboneConfig, LoopConfig]:
    """The backbone and loop that the command line describes."""
    from tah2.config.loop import LoopConfig
    from tah2.config.strict import ConfigError, build, merge
    from tah2.model.kinds import kind_of

    backbone, stored = _shape(options.backbone)
    chosen: dict[str, Any] = {"kind": options.loop, "max_depth": options.max_depth}
    for pair in options.extra:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, not {pair!r}.")
        chosen[key.replace("-", "_")] = value
    if options.loop is None and stored is None:
        raise ConfigError("Say which loop with --loop, for example --loop tah2.")
    base = stored if stored is not None and options.loop in (None, stored.get("kind")) else {}
    loop = build(LoopConfig, merge(base, {k: v for k, v in chosen.items() if v is not None}), "loop")
    kind_of(loop)
    return backbone, loop


def _shape(name: str) -> tuple[BackboneConfig, dict[str, Any] | None]:
    """A preset's backbone, or a folder's backbone and the loop that it holds, if any."""
    from tah2.config.backbone import BackboneConfig, preset
    from tah2.config.strict import ConfigError, read_mapping

    folder = Path(name)
    if not folder.is_dir():
        if "/" in name and not name.lower().startswith("qwen/"):
            raise ConfigError(f"There is no folder {name!r}; name a folder with a config.json, or a preset.")
        return preset(name), None
    config = read_mapping(folder / "config.json")
    looped = config.get("model_type") == "looped"
    try:
        backbone = BackboneConfig.from_hf(config["backbone"] if looped else config)
        return backbone, dict(config["loop"]) if looped else None
    except KeyError as missing:
        raise ConfigError(f"{folder / 'config.json'} lacks {missing}, so it describes no backbone.") from None


def _params(options: argparse.Namespace) -> dict[str, Any]:
    from tah2.compute.parameters import parameter_counts

    backbone, loop = _model(options)
    counts = parameter_counts(backbone, loop)
    return {
        "model": options.backbone,
        "loop": loop.kind,
        "backbone": counts.backbone,
        "added": counts.added,
        "added_total": counts.added_total,
        "total": counts.total,
        "fraction": counts.fraction,
    }


def _decode(options: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from tah2.compute.decode import decode_per_token
    from tah2.config.loop import LoopConfig

    backbone, loop = _model(options)
    cost = decode_per_token(backbone, loop, options.fractions, options.mean_keys)
    standard = decode_per_token(backbone, LoopConfig("standard"), [], options.mean_keys).total
    return {
        **_inputs(options, loop),
        "per_token": cost.total,
        "breakdown": asdict(cost),
        "standard": standard,
        "vs_standard": cost.total / standard,
    }


def _train(options: argparse.Namespace) -> dict[str, Any]:
    from tah2.compute.train import train_flops
    from tah2.config.loop import LoopConfig

    backbone, loop = _model(options)
    cost = train_flops(backbone, loop, options.fractions, options.mean_keys, options.tokens)
    standard = train_flops(backbone, LoopConfig("standard"), [], options.mean_keys, options.tokens).total_paper
    return {
        **_inputs(options, loop),
        "tokens": options.tokens,
        "forward_backward": cost.forward_backward,
        "label_paper": cost.label_paper,
        "label_actual": cost.label_actual,
        "total_paper": cost.total_paper,
        "total_actual": cost.total_actual,
        "standard": standard,
        "vs_standard": cost.total_paper / standard,
        "vs_standard_actual": cost.total_actual / standard,
    }


def _inputs(options: argparse.Namespace, loop: LoopConfig) -> dict[str, Any]:
    from tah2.model.kinds import kind_of

    return {
        "model": options.backbone,
        "loop": loop.kind,
        "max_depth": kind_of(loop).ceiling(loop),
        "continue": options.fractions,
        "mean_keys": options.mean_keys,
    }


def _table(options: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from tah2.compute.published import rows

    return {"rows": [asdict(row) for row in rows()]}


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    if "rows" in report:
        for title, rows in groupby(report["rows"], key=lambda row: row["table"]):
            Console().print(_comparison(title, list(rows)))
        return
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _flat(report):
        table.add_row(name.replace("_", " "), value)
    Console().print(table)


def _comparison(title: str, rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("", "unit", title=title)
    for heading in ("published", "ours", "difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        theirs, ours = row["published"], row["ours"]
        table.add_row(row["name"], row["unit"], f"{theirs:.6g}", f"{ours:.6g}", f"{ours / theirs - 1:+.2%}")
    return table


def _flat(report: dict[str, Any], indent: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [(f"{indent}{name}", ""), *_flat(value, indent + "  ")]
        else:
            lines.append((indent + name, _readable(name, value)))
    return lines


def _readable(name: str, value: Any) -> str:
    """Counts and FLOPs with a unit prefix, ratios as factors, everything else as it is."""
    if name.startswith("vs_standard"):
        return f"{value:.3f}x"
    if name == "fraction":
        return f"{value:.3%}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if not isinstance(value, (int, float)) or value < 1e5:
        return f"{value:g}" if isinstance(value, float) else str(value)
    for scale, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= scale:
            return f"{value / scale:.2f} {prefix}"
    return str(value)
