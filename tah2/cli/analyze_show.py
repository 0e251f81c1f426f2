"""What `tah2 analyze` prints for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

Found = Mapping[str, Any]


def show(name: str, found: Found, console: Console | None = None) -> None:
    console = console or Console()
    console.print(f"{found['model']} ({found['loop']}, M = {found['max_depth']}) on {found['documents']} documents")
    SHOWS[name](found, console)


def _gains(found: Found, console: Console) -> None:
    table = Table("tokens", title=f"Loss from iteration {found['first']} to {found['final']}", title_justify="left")
    for column in ("number", "worse", "little change", "better", "mean gain (nats)"):
        table.add_column(column, justify="right")
    for label, row in {"all": found, **found["by_tag"]}.items():
        shares = [f"{100 * row[share]:.1f}%" for share in ("worse", "little", "better")]
        table.add_row(label, f"{row['tokens']:,}", *shares, f"{row['mean']:+.4f}")
    console.print(table)
    console.print(
        f"Worse tokens lost {-found['lost']:.4f} nats per token, better ones won {found['won']:.4f}. "
        "Little is a change of at most 0.001."
    )


def _alignment(found: Found, console: Console) -> None:
    for part in found["depths"]:
        table = Table("continue probability", title=f"After iteration {part['depth']}", title_justify="left")
        for column in ("tokens", "mean gain (nats)", "95% interval"):
            table.add_column(column, justify="right")
        for band in part["bands"]:
            if band["tokens"]:
                table.add_row(f"{band['low']:.2f} to {band['high']:.2f}", *_band(band))
        table.add_section()
        table.add_row(f"within 0.1 of {found['threshold']:g}", *_band(part["near_threshold"]))
        table.add_row("below it: stops", *_band(part["stopped"]))
        table.add_row("above it: continues", *_band(part["continued"]))
        console.print(table)


def _band(band: Found) -> tuple[str, str, str]:
    if not band["tokens"]:
        return "0", "", ""
    low, high = band["interval"]
    return f"{band['tokens']:,}", f"{band['gain']:+.4f}", f"{low:+.4f} to {high:+.4f}"


def _depths(found: Found, console: Console) -> None:
    ceiling = found["ceiling"]
    for response in found["maps"]:
        console.print(f"\n{response['title']}, mean depth {response['mean']:.2f}")
        console.print(coloured(response, ceiling, plain=console.no_color or not console.is_terminal))
    key = Text("iterations: ")
    for depth in range(1, ceiling + 1):
        key.append(f" {depth} ", style=_style(depth, ceiling))
    console.print(key)
    table = Table("kind of token", title="Depth by kind of token", title_justify="left")
    for column in ("tokens", "mean depth", *(f"{depth}" for depth in range(1, ceiling + 1))):
        table.add_column(column, justify="right")
    for label, row in {"all": found, **found["by_class"]}.items():
        shares = [f"{100 * share:.1f}%" for share in row["shares"]]
        table.add_row(label, f"{row['tokens']:,}", f"{row['mean']:.3f}", *shares)
    console.print(table)
    parts = "  ".join(f"{mean:.2f}" for mean in found["by_place"])
    console.print(f"Mean depth in tenths of the response: {parts}")


def coloured(response: Found, ceiling: int, plain: bool = False) -> Text:
    """The response with tokens on the shade of their depth; without colours, deep tokens carry their depth."""
    text = Text()
    for word, depth in zip(response["words"], response["depths"], strict=True):
        if plain and depth > 1:
            body = word.rstrip()
            text.append(body + "".join("₀₁₂₃₄₅₆₇₈₉"[int(digit)] for digit in str(depth)) + word[len(body) :])
        else:
            text.append(word, style=None if plain else _style(depth, ceiling))
    return text


def _style(depth: int, ceiling: int) -> Style:
    from tah2.study.report.draw.depths import is_deep, shade

    if depth == 1:
        return Style()
    return Style(bgcolor=shade(depth, ceiling), color="#ffffff" if is_deep(depth, ceiling) else "#10151b")


def _attention(found: Found, console: Console) -> None:
    table = Table("head", title=f"Attention mass of queries at iteration {found['depth']}", title_justify="left")
    for depth in range(1, found["depth"] + 1):
        table.add_column(f"keys of {depth}", justify="right")
    words = {"first": "most on the first", "later": "most on later ones", "both": "most mixed"}
    for head in found["heads"]:
        label = f"layer {head['layer'] + 1}, head {head['head'] + 1} ({words[head['role']]})"
        masses = [f"{mean:.3f} ± {std:.3f}" for mean, std in zip(head["mean"], head["std"], strict=True)]
        table.add_row(label, *masses)
    console.print(table)
    console.print(f"Means over {found['sequences']} sequences ± one standard deviation.")
    if found["depth"] < found["ceiling"]:
        console.print(f"Iterations after {found['depth']} occur in fewer than a quarter of the sequences.")


SHOWS: dict[str, Callable[[Found, Console], None]] = {
    "gains": _gains,
    "alignment": _alignment,
    "depths": _depths,
    "attention": _attention,
}
