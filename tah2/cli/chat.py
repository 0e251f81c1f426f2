"""`tah2 chat`: talk to a model in the terminal and see how deep it went for every token."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tah2.config.strict import ConfigError

if TYPE_CHECKING:
    from tah2.cli.chat_screen import Screen
    from tah2.cli.chat_speaker import Knobs, Message, Speaker

DESCRIPTION = """\
Talk to a looped checkpoint in the terminal. Every token wears the colour of its depth: how often the model ran its
layers before it wrote that token. After each answer: mean depth, and FLOPs against the plain model.

MODEL is a folder or hub id of a looped checkpoint (tah2 convert makes one). A model without a chat template
continues the text. NO_COLOR=1 turns colours off; depths then show as small digits behind the tokens.
"""
EPILOG = """\
examples:
  tah2 chat out/tah2
  tah2 chat out/tah2 --max-depth 4 --exit-threshold 0.3 --temperature 0
  tah2 chat --endpoint http://127.0.0.1:8000        (its API key: OPENAI_API_KEY)
  echo "Why do loops help?" | tah2 chat out/tah2
"""
HELP = """\
/depth N       run at most N passes per token; /depth auto follows the checkpoint
/threshold X   continue while the probability is at least X: lower goes deeper; /threshold auto
/temperature T draw with temperature T; 0 takes the most probable token
/tokens N      write at most N tokens per answer
/reset         forget the conversation
/help, /quit   this text; leave (so does Ctrl-D)

A line that ends in \\ goes on in the next one; \"\"\" opens and closes a block of lines.
Ctrl-C stops the answer."""
BLOCK = '"""'


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    from tah2.cli.chat_screen import Screen
    from tah2.cli.chat_speaker import Knobs

    knobs = Knobs(
        options.max_depth,
        options.exit_threshold,
        options.temperature,
        options.top_p,
        options.top_k,
        options.max_tokens,
        options.seed,
    )
    screen = Screen(marks=True if options.marks else None)
    chat = Chat(_speaker(options), screen, knobs, options.system)
    chat.greet()
    chat.run(_reader(screen))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tah2 chat",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="folder or hub id of a looped checkpoint")
    parser.add_argument("--endpoint", metavar="URL", help="talk to a server of `tah2 serve` instead of loading MODEL")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument("--marks", action="store_true", help="small digits behind tokens deeper than one pass")
    loop = parser.add_argument_group("depth (also changed while you talk)")
    loop.add_argument("--max-depth", type=int, metavar="M", help="depth ceiling (default: the checkpoint's)")
    loop.add_argument("--exit-threshold", type=float, metavar="P", help="continue from this probability on")
    drawing = parser.add_argument_group("sampling")
    drawing.add_argument("--temperature", type=float, metavar="T", help="default: the checkpoint's, else 0.7")
    drawing.add_argument("--top-p", type=float, metavar="P", help="default: the checkpoint's, else 1")
    drawing.add_argument("--top-k", type=int, metavar="K", help="default: the checkpoint's, else all tokens")
    drawing.add_argument("--max-tokens", type=int, default=512, metavar="N", help="per answer (default: 512)")
    drawing.add_argument("--seed", type=int, metavar="N", help="makes answers repeatable")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    machine.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    machine.add_argument("--max-model-len", type=int, metavar="N", help="longest conversation, in tokens")
    return parser


def _speaker(options: argparse.Namespace) -> Speaker:
    if options.endpoint is not None:
        from tah2.cli.chat_remote import RemoteSpeaker

        return RemoteSpeaker(options.endpoint, options.model)
    if options.model is None:
        raise ConfigError("Say which MODEL to talk to, or where a server is (--endpoint URL).")
    from rich.console import Console

    with Console(stderr=True).status(f"Loading {options.model} ..."):
        import torch
        from transformers.utils.logging import disable_progress_bar

        from tah2.cli.chat_speaker import LocalSpeaker
        from tah2.engine.llm import LLM

        disable_progress_bar()
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        limits = {} if options.max_model_len is None else {"max_model_len": options.max_model_len}
        return LocalSpeaker(LLM(options.model, dtype=dtype, device=options.device, **limits), options.model)


class Chat:
    """A conversation and its knobs. Each line is a command, or a message that gets an answer."""

    def __init__(self, speaker: Speaker, screen: Screen, knobs: Knobs, system: str | None = None) -> None:
        self.speaker, self.screen, self.knobs = speaker, screen, knobs
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)
        self._commands: dict[str, Callable[[str], None]] = {
            "depth": self._depth,
            "threshold": self._threshold,
            "temperature": self._temperature,
            "tokens": self._tokens,
            "reset": self._reset,
            "help": self._help,
        }

    def greet(self) -> None:
        speaker = self.speaker
        self.screen.note(f"{speaker.name}: {self._settings()}. /help lists the commands.")
        if not speaker.chats:
            self.screen.note("There is no chat template, so the model continues the text as it stands.")
        if speaker.max_depth is not None:
            self.screen.legend(max(self.knobs.max_depth or speaker.max_depth, 1))

    def run(self, messages: Iterator[str]) -> None:
        """Until the input ends or the user quits."""
        for text in messages:
            if text.startswith("/") and "\n" not in text:
                name, _, argument = text[1:].partition(" ")
                if name in ("quit", "exit", "q"):
                    return
                self._command(name, argument.strip())
            elif text.strip():
                self.say(text)

    def say(self, text: str) -> None:
        """Ask, and show the answer as it comes. A message that cannot be answered is forgotten."""
        asked = {"role": "user", "content": text}
        written = ""
        try:
            answer = self.speaker.answer([*self.messages, asked], self.knobs)
            with stop_on_interrupt() as stopped:
                for piece in answer:
                    written += piece.text
                    self.screen.piece(piece)
                    if stopped():
                        break
        except (ValueError, RuntimeError, OSError) as error:
            self.screen.line()
            self.screen.line(f"{_sentence(error)} (/reset starts a new conversation.)")
            return
        self.screen.line()
        self.screen.tally(tally := answer.tally())
        if tally.depths:
            self.messages += [asked, {"role": "assistant", "content": written}]

    def _command(self, name: str, argument: str) -> None:
        if name not in self._commands:
            self.screen.line(f"There is no command /{name}; the commands are:")
            self._help("")
            return
        try:
            self._commands[name](argument)
        except ValueError as error:
            self.screen.line(str(error))

    def _depth(self, argument: str) -> None:
        value = _number("/depth", argument, int, least=1)
        self._turn(max_depth=value)
        ceiling = value or self.speaker.max_depth
        if ceiling is not None:
            self.screen.legend(ceiling)

    def _threshold(self, argument: str) -> None:
        self._turn(exit_threshold=_number("/threshold", argument, float, least=0))

    def _temperature(self, argument: str) -> None:
        self._turn(temperature=_number("/temperature", argument, float, least=0))

    def _tokens(self, argument: str) -> None:
        value = _number("/tokens", argument, int, least=1)
        self._turn(max_tokens=512 if value is None else value)

    def _turn(self, **knobs: Any) -> None:
        self.knobs = replace(self.knobs, **knobs)
        self.screen.note(self._settings())

    def _reset(self, argument: str) -> None:
        self.messages = list(self._opening)
        self.screen.note("The conversation is forgotten.")

    def _help(self, argument: str) -> None:
        self.screen.line(HELP)
        self.screen.note(self._settings())

    def _settings(self) -> str:
        knobs, speaker = self.knobs, self.speaker
        depth = knobs.max_depth or speaker.max_depth
        parts = [f"at most {depth} pass{'es' if depth != 1 else ''}" if depth else "passes as the server decides"]
        threshold = speaker.exit_threshold if knobs.exit_threshold is None else knobs.exit_threshold
        if threshold is not None:
            parts.append(f"exit threshold {threshold:g}")
        if knobs.temperature is not None:
            parts.append(f"temperature {knobs.temperature:g}")
        parts.append(f"at most {knobs.max_tokens} tokens")
        return ", ".join(parts)


def _number(name: str, argument: str, kind: type[int] | type[float], least: float) -> Any:
    """The number behind a command; None for "auto"."""
    if argument == "auto":
        return None
    try:
        value = kind(argument)
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        whole = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} takes {whole} of at least {least:g}, or auto.")
    return value


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks instead of interrupting, so that no pass is cut in half; a second one interrupts."""
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _reader(screen: Screen) -> Iterator[str]:
    """Messages from the terminal or a pipe; lines joined by a trailing backslash or by a block."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # it gives input() editing and history
            import readline  # noqa: F401
    while True:
        try:
            yield _message(interactive)
        except EOFError:
            return
        except KeyboardInterrupt:
            screen.line()
            screen.note("Ctrl-D or /quit leaves.")


def _message(interactive: bool) -> str:
    line = input("> " if interactive else "")
    if line.strip().startswith(BLOCK):
        return _block(line.strip()[len(BLOCK) :], interactive)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… " if interactive else ""))
    return "\n".join(lines)


def _block(first: str, interactive: bool) -> str:
    """The lines up to the closing quotes, or to the end of the input."""
    lines = [first]
    while not lines[-1].rstrip().endswith(BLOCK):
        try:
            lines.append(input("… " if interactive else ""))
        except EOFError:
            break
    return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
