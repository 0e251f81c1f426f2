"""`tah2 convert`: turn a pretrained model into a looped checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tah2.model.checkpoint import Conversion

DESCRIPTION = """\
Turn a pretrained model into a looped checkpoint, ready to post-train, serve and evaluate.

SRC is a folder with a Hugging Face checkpoint of the Qwen3, Qwen2/2.5 or Llama/SmolLM family, the id of one on the
hub, a GGUF file, or a looped checkpoint (to change its kind or depth: trained parts that fit are kept). OUT receives
weights, config, tokenizer and generation config; it loads with AutoModelForCausalLM after `import tah2`.

The backbone is not changed, so a call with max_depth=1 predicts what SRC predicts. Where the loop has a
learned updater, it is fitted so that a second pass starts near something that the backbone knows; deeper passes help
only after post-training (tah2 sft).
"""
EPILOG = """\
examples:
  tah2 convert Qwen/Qwen3-1.7B-Base out/tah2 --loop tah2 --max-depth 2
  tah2 convert path/to/base out/deep --loop tah2 --max-depth 8 --start-text corpus.txt --dtype bfloat16
  tah2 convert path/to/base out/small --updater-width 256 --decider-width 128 --decider-top-k 64
  tah2 convert path/to/base out/huginn --loop huginn --max-depth 3 --prelude-layers 7 --coda-layers 7
  tah2 convert model.gguf out/ouro --loop ouro --max-depth 4
  tah2 convert out/tah2 out/tah2-m4 --loop tah2 --max-depth 4
"""
WEAK_FIT = 0.9
"""Above this unexplained share the fit has learned little that holds for new text."""

LOOP_OPTIONS = (
    "exit_threshold",
    "reentry",
    "output",
    "updater_width",
    "decider_width",
    "decider_top_k",
    "embedding_top_k",
    "prelude_layers",
    "coda_layers",
)
"""Fields of `LoopConfig` that the command line may set."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    from tah2.model.checkpoint import run_conversion
    from tah2.model.start import StartConfig

    given: dict[str, Any] = {"kind": options.loop, "max_depth": options.max_depth}
    given |= {name: value for name in LOOP_OPTIONS if (value := getattr(options, name)) is not None}
    start = StartConfig(updater=options.start, text=options.start_text, seed=options.seed)
    made = run_conversion(options.source, options.out, given, start, options.dtype)
    print("\n".join(_report(made)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tah2 convert",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", help="folder, hub id or .gguf file")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the looped checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: SRC's)")
    loop = parser.add_argument_group("the loop")
    loop.add_argument("--loop", default="tah2", metavar="KIND", help="loop kind (default: tah2)")
    loop.add_argument("--max-depth", type=int, default=2, metavar="M", help="depth ceiling (default: 2)")
    loop.add_argument("--exit-threshold", type=float, metavar="P", help="continue from this probability on (0.5)")
    loop.add_argument("--updater-width", type=int, metavar="N", help="inner width of the updater (backbone's width)")
    loop.add_argument("--decider-width", type=int, metavar="N", help="inner width of the decider (backbone's width)")
    loop.add_argument("--decider-top-k", type=int, metavar="K", help="probabilities that the decider reads (as wide)")
    loop.add_argument("--prelude-layers", type=int, metavar="N", help="layers before a looped middle (a quarter)")
    loop.add_argument("--coda-layers", type=int, metavar="N", help="layers after a looped middle (a quarter)")
    loop.add_argument("--reentry", metavar="NAME", help="how the next pass's input is made, instead of the kind's way")
    loop.add_argument("--embedding-top-k", type=int, metavar="K", help="tokens that top-k-embedding mixes (100)")
    loop.add_argument("--output", metavar="NAME", help="stopping-mixture, uniform-mixture or last")
    start = parser.add_argument_group("the start of a learned updater")
    start.add_argument(
        "--start",
        choices=("predicted-embedding", "embedding", "random"),
        default="predicted-embedding",
        help="fit it to the expected next embedding (default), to the token's own embedding, or not at all",
    )
    start.add_argument("--start-text", type=Path, metavar="FILE", help="text to fit on (default: a short built-in one)")
    start.add_argument("--seed", type=int, default=0, help="of new weights and of the fit (default: 0)")
    return parser


def _report(made: Conversion) -> list[str]:
    from tah2.compute.parameters import parameter_counts
    from tah2.model.kinds import kind_of

    counts = parameter_counts(made.backbone, made.loop)
    passes = kind_of(made.loop).ceiling(made.loop)
    depth = f", up to {passes} passes" if passes > 1 else ", one pass"
    lines = [f"loop        {made.loop.kind}{depth}", f"backbone    {_millions(counts.backbone)} parameters"]
    for name, count in counts.added.items():
        lines.append(f"added       {_millions(count)} in the {name.replace('-', ' ')}")
    if counts.added:
        lines.append(f"            {counts.fraction:.2%} of all parameters")
    if made.kept:
        lines.append(f"kept        the source's {' and '.join(made.kept)}")
    if made.unexplained is not None:
        lines.append(
            f"start       the updater leaves {made.unexplained:.0%} of its target unexplained on held-out text"
        )
        if made.unexplained > WEAK_FIT:
            lines.append("            (more text may help: --start-text FILE)")
    return [*lines, f"saved to    {made.path}"]


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e4 else str(count)
