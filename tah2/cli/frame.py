"""The frame of the `tah2` command: which subcommands there are, and what happens when one goes wrong.

A subcommand is a module with `main(argv: list[str]) -> int | None`. Its module is imported when it is chosen and
not before, so that `tah2 --help`, `tah2 --version` and a mistyped name answer at once. A mistake of the user
(`ValueError`, and so `ConfigError`, or a file that cannot be read) becomes one sentence on stderr and exit code 2;
`TAH2_DEBUG=1` shows the traceback instead.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NamedTuple

USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "convert": Command("tah2.cli.convert", "turn a pretrained model into a looped checkpoint"),
    "sft": Command("tah2.cli.sft", "post-train a model as a recipe says, on a laptop or a cluster"),
    "chat": Command("tah2.cli.chat", "talk to a model in the terminal and see how deep it went for every token"),
    "distill": Command("tah2.cli.distill", "let a teacher answer prompts, and write its answers as training data"),
    "serve": Command("tah2.cli.serve", "serve a looped checkpoint with OpenAI's API and a page to chat with"),
    "eval": Command("tah2.cli.eval", "generate responses to benchmarks, one record each, resumable"),
    "grade": Command("tah2.cli.grade", "judge the responses of a run and print its scores"),
    "curves": Command("tah2.cli.curves", "compare runs at matched compute: cutoffs, slopes, votes, figures"),
    "lm-eval": Command("tah2.cli.lm_eval", "run the lm-evaluation-harness on looped models (--model tah2)"),
    "study": Command("tah2.cli.study", "post-train and compare every variant of a study, and write it up"),
    "analyze": Command("tah2.cli.analyze", "see what iterations do: gains, alignment, depths, attention"),
    "decontaminate": Command("tah2.cli.decontaminate", "find training rows that hold problems of the benchmarks"),
    "bench": Command("tah2.cli.bench", "measure time and memory on this machine, as ratios taken side by side"),
    "flops": Command("tah2.cli.flops", "count parameters and FLOPs of a loop, without its weights"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE
    except (ValueError, OSError) as error:
        if os.environ.get("TAH2_DEBUG", "0") not in ("", "0"):
            raise
        print(f"tah2: {sentence(error)}", file=sys.stderr)
        return USAGE_ERROR
    return code


def sentence(error: Exception) -> str:
    """The error as one line, whatever its message looked like."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or 'cannot be used').lower()}."
    return " ".join(str(error).split()) or type(error).__name__


def usage() -> str:
    """What `tah2 --help` prints."""
    width = max(map(len, COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tah2 COMMAND [arguments]",
            "",
            "Turn a pretrained language model into an adaptive looped transformer.",
            "",
            "commands:",
            *lines,
            "",
            "`tah2 COMMAND --help` explains one command; `tah2 --version` prints the version.",
        ]
    )


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(usage(), file=sys.stderr)
        return USAGE_ERROR
    name, *rest = argv
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        from tah2 import __version__

        print(f"tah2 {__version__}")
        return 0
    if name not in COMMANDS:
        raise ValueError(_unknown(name))
    result: int | None = importlib.import_module(COMMANDS[name].module).main(rest)
    return result or 0


def _unknown(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}."
    return f"Unknown command {name!r}; {hint}"


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
