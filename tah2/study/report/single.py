"""One analysis of one checkpoint as files: JSON, CSV, figures and, for depths, a page of responses."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tah2.config.strict import ConfigError
from tah2.study.report import page
from tah2.study.report.blocks import Block, Figure, Raw, Section
from tah2.study.report.draw.attention import draw_all_heads, draw_maps, draw_mass
from tah2.study.report.draw.depths import depth_html, draw_by_class, draw_depth_maps, key_html
from tah2.study.report.draw.tokens import draw_alignment, draw_gains
from tah2.study.report.style import styled
from tah2.study.report.svg import save_figure

RESPONSES = "depth-maps"
Found = Mapping[str, Any]
Maps = NDArray[np.float32] | None
Drawn = tuple[str, str, str, Any]
"""(file name, title, caption, drawing)"""


def write_analysis(name: str, found: Found, maps: Maps, out: Path) -> Path:
    """`out`/NAME.json, NAME.csv, NAME.html and the figures; returns the page."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("Figures need matplotlib: pip install 'tah2[plots]'.") from None
    out.mkdir(parents=True, exist_ok=True)
    _put(out / f"{name}.json", json.dumps(found, indent=1) + "\n")
    _write_csv(out / f"{name}.csv", ROWS[name](found))
    if maps is not None:
        np.savez_compressed(out / "attention-maps.npz", maps=maps)
    blocks: list[Block] = []
    with styled():
        for file, title, caption, drawing in DRAWINGS[name](found, maps):
            save_figure(drawing, out, file)
            if file == RESPONSES:
                continue  # the page shows them as text
            blocks.append(Figure(f"figure-{file}", title, caption, f"{title}. {caption}", drawing))
        if name == "depths":
            blocks = [*_responses(found), *blocks]
        lead = f"{found['model']} ({found['loop']}, M = {found['max_depth']}) on {found['documents']} documents"
        section = Section(name, f"{name.capitalize()} of {Path(found['model']).name}", tuple(blocks))
        text = page.render(f"tah2 analyze {name}", lead, [section], f"Data: {found['data']}.")
    _put(out / f"{name}.html", text)
    return out / f"{name}.html"


def _responses(found: Found) -> Iterator[Block]:
    yield Raw(key_html(found["ceiling"]))
    for response in found["maps"]:
        yield Raw(f"<h3>{response['title']}, mean depth {response['mean']:.2f}</h3>")
        yield Raw(depth_html(response, found["ceiling"]))


def _draw_gains(found: Found, maps: Maps) -> Iterator[Drawn]:
    title = f"{found['loop']}, M = {found['max_depth']}"
    words = f"Loss reduction per token from iteration {found['first']} to {found['final']}, all tokens running all."
    yield "gains", "Gains of looping every token", words, draw_gains([(title, found)])


def _draw_alignment(found: Found, maps: Maps) -> Iterator[Drawn]:
    content = [(f"after iteration {part['depth']}", part["bands"], found["threshold"]) for part in found["depths"]]
    words = "Mean loss reduction of one more pass by continue probability; bars are 95% intervals over documents."
    yield "alignment", "Gain against continue probability", words, draw_alignment(content)


def _draw_depths(found: Found, maps: Maps) -> Iterator[Drawn]:
    if found["maps"]:
        words = "Responses, every token on the shade of the iterations that its prediction took."
        yield RESPONSES, "Depth token by token", words, draw_depth_maps(found["maps"], found["ceiling"])
    words = "Share of the tokens of each kind that stop after so many iterations, and their mean depth."
    yield "depths", "Depth by kind of token", words, draw_by_class(found["by_class"], found["ceiling"])


def _draw_attention(found: Found, maps: Maps) -> Iterator[Drawn]:
    words = (
        f"Mass that queries at iteration {found['depth']} give to keys of each iteration; means over "
        f"{found['sequences']} sequences, whiskers one standard deviation."
    )
    yield "attention-mass", "Attention mass by iteration of the keys", words, draw_mass(found["heads"])
    every = np.asarray(found["mean"])
    yield "attention-heads", "All heads", "Mass beyond the first iteration, head by head.", draw_all_heads(every)
    if maps is not None:
        words = "Mean weights over the first response positions; prompt keys left out, grey where no query ran."
        yield "attention-maps", "Attention maps", words, draw_maps(found["heads"], np.asarray(maps, np.float64))


Row = Sequence[Any]


def _rows_of_gains(found: Found) -> Iterator[Row]:
    yield "tokens", "number", "worse", "little", "better", "mean"
    for label, row in {"all": found, **found["by_tag"]}.items():
        yield label, row["tokens"], row["worse"], row["little"], row["better"], row["mean"]


def _rows_of_alignment(found: Found) -> Iterator[Row]:
    yield "depth", "low", "high", "tokens", "probability", "gain", "gain_low", "gain_high"
    for part in found["depths"]:
        for band in part["bands"]:
            interval = band["interval"] or ("", "")
            yield (
                part["depth"], band["low"], band["high"], band["tokens"], band["probability"], band["gain"], *interval,
            )  # fmt: skip


def _rows_of_depths(found: Found) -> Iterator[Row]:
    yield "kind", "tokens", "mean_depth", *(f"depth_{depth}" for depth in range(1, found["ceiling"] + 1))
    for label, row in {"all": found, **found["by_class"]}.items():
        yield label, row["tokens"], row["mean"], *row["shares"]


def _rows_of_attention(found: Found) -> Iterator[Row]:
    yield "layer", "head", *(f"mass_{depth}" for depth in range(1, found["depth"] + 1))
    for layer, heads in enumerate(found["mean"], start=1):
        for head, masses in enumerate(heads, start=1):
            yield layer, head, *masses


def _write_csv(path: Path, rows: Iterator[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _put(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


DRAWINGS: dict[str, Callable[[Found, Maps], Iterator[Drawn]]] = {
    "gains": _draw_gains,
    "alignment": _draw_alignment,
    "depths": _draw_depths,
    "attention": _draw_attention,
}
ROWS: dict[str, Callable[[Found], Iterator[Row]]] = {
    "gains": _rows_of_gains,
    "alignment": _rows_of_alignment,
    "depths": _rows_of_depths,
    "attention": _rows_of_attention,
}
