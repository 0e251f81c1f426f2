"""A drawn figure as files (PNG, PDF, SVG) and as SVG inside a page."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

from tah2.study.report.style import PALETTE, PAPER

_VARIABLES = {pair[0]: f"var(--f-{name})" for name, pair in PALETTE.items()}
_COLOURS = re.compile("|".join(map(re.escape, _VARIABLES)))
_UNDATED = {"Date": None, "Creator": "tah2"}


def save_figure(figure: Any, folder: Path, name: str) -> None:
    """`folder`/`name`.png, .pdf and .svg on white paper."""
    folder.mkdir(parents=True, exist_ok=True)
    settle(figure)
    figure.savefig(folder / f"{name}.png", dpi=160, facecolor=PAPER, metadata={"Software": None})
    figure.savefig(folder / f"{name}.pdf", facecolor=PAPER, metadata={"CreationDate": None})
    text = _svg(figure)
    opening = text.index("<svg")
    behind = text.index(">", opening) + 1
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    (folder / f"{name}.svg").write_text(text[:behind] + paper + text[behind:], encoding="utf-8")


def _svg(figure: Any) -> str:
    """The figure as SVG on nothing, drawn once."""
    if not hasattr(figure, "_tah2_svg"):
        buffer = io.StringIO()
        settle(figure)
        figure.savefig(buffer, format="svg", metadata=_UNDATED)
        figure._tah2_svg = buffer.getvalue()
    text: str = figure._tah2_svg
    return text


def settle(figure: Any) -> None:
    """Lay the figure out once; whatever is saved afterwards has this layout."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def inline_svg(figure: Any, name: str, title: str, description: str) -> str:
    """The figure as an SVG element that follows the page's colours; `name` keeps its ids apart from other figures'."""
    text = _svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = _COLOURS.sub(lambda found: _VARIABLES[found.group()], text)
    text = re.sub(r"font-family: 'DejaVu Sans'[^;\"]*;? ?", "", text)  # the page's own
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag.group()), text)
    opening = re.match(r"<svg[^>]*>", text)
    assert opening is not None
    box = re.search(r'viewBox="([^"]*)"', opening.group())
    width = re.search(r'width="([\d.]+)pt"', opening.group())
    assert box is not None
    assert width is not None
    head = (
        f'<svg class="figure" viewBox="{box.group(1)}" style="max-width:{float(width.group(1)) * 4 / 3:.0f}px" '
        f'role="img" aria-labelledby="{name}-title {name}-desc" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-desc">{html.escape(description)}</desc>'
    )
    return re.sub(r"\n\s*", "\n", head + text[opening.end() :]).strip()
