"""What `tah2 chat` shows: tokens in the colour of their depth, and what an answer cost."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import IO

from rich.console import Console
from rich.style import Style
from rich.text import Text

from tah2.cli.chat_speaker import Piece, Tally

PALETTE = ("", "#1a73d9", "#0f8060", "#b35c00", "#c2378f")
"""Depths 1, 2, ...; deeper ones wear the last. All reach a contrast of 4 or more on white and on black."""
UNDERLINED_FROM = 3
BOLD_FROM = 4
DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
WRITING = "\n\t\u200c\u200d"
"""Control and format characters that belong to text: the last two hold letters and emoji apart or together."""
SCALE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


class Screen:
    """Writes to a terminal, or plain text where there is none.

    `marks`: tokens deeper than one pass carry their depth as a small digit; by default only where colours are off.
    """

    def __init__(self, file: IO[str] | None = None, marks: bool | None = None) -> None:
        self.console = Console(file=file, highlight=False, soft_wrap=True)
        self.colours = self.console.is_terminal and not self.console.no_color
        self.marks = self.console.is_terminal and not self.colours if marks is None else marks

    def style(self, depth: int) -> Style:
        return Style(
            color=PALETTE[min(depth, len(PALETTE)) - 1] or None,
            underline=depth >= UNDERLINED_FROM,
            bold=depth >= BOLD_FROM,
        )

    def piece(self, piece: Piece) -> None:
        text = printable(piece.text)
        body = text.rstrip()
        if self.marks and piece.depth > 1 and body:
            text = body + str(piece.depth).translate(DIGITS) + text[len(body) :]
        self._write(Text(text, self.style(piece.depth)), end="")

    def line(self, text: str = "") -> None:
        self._write(Text(text))

    def note(self, text: str) -> None:
        self._write(Text(text, Style(dim=True)))

    def legend(self, max_depth: int) -> None:
        """The colours of depths 1 to `max_depth`."""
        text = Text().append("depth ", Style(dim=True))
        for depth in range(1, max_depth + 1):
            label = f" {depth} " if depth < len(PALETTE) or depth == max_depth else f" {depth}+ "
            text.append(label, self.style(depth))
            if label.endswith("+ "):
                break
        self._write(text)

    def tally(self, tally: Tally) -> None:
        self.note(summary(tally))

    def _write(self, text: Text, end: str = "\n") -> None:
        self.console.print(text, end=end, soft_wrap=True)


def printable(text: str) -> str:
    """The text without control characters: a model's output must not drive the terminal."""
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf") and c not in WRITING else c for c in text)


def summary(tally: Tally) -> str:
    """One line: tokens, mean depth, tokens by depth, FLOPs against the plain model, speed."""
    count = len(tally.depths)
    if not count:
        return "no tokens"
    parts = [f"{count} token{'s' if count > 1 else ''}", f"mean depth {sum(tally.depths) / count:.2f}"]
    spread = Counter(tally.depths)
    if len(spread) > 1:
        parts.append("by depth " + ", ".join(f"{depth}: {spread[depth]}" for depth in sorted(spread)))
    if tally.flops and tally.plain_flops:
        per_token = si(tally.flops / (count - 1))
        parts.append(f"{per_token}FLOPs/token, {tally.flops / tally.plain_flops:.2f}x the plain model")
    if tally.seconds > 0:
        parts.append(f"{count / tally.seconds:.1f} tokens/s")
    if tally.finish_reason == "length":
        parts.append("cut at the token limit (/tokens N raises it)")
    elif tally.finish_reason is None:
        parts.append("stopped")
    return " · ".join(parts)


def si(value: float) -> str:
    """`1.23 G`: three digits and a unit prefix."""
    size, prefix = next(((size, prefix) for size, prefix in SCALE if value >= size), SCALE[-1])
    return f"{value / size:.3g} {prefix}"
