"""`write_report`: a study's folder -> one page, its figures as files and its tables as CSV."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tah2.config.strict import ConfigError
from tah2.study.report import page
from tah2.study.report.blocks import Block, Figure, Missing, Section, Table
from tah2.study.report.sections import scaling, tokens
from tah2.study.report.style import styled
from tah2.study.report.svg import save_figure
from tah2.study.report.view import View, open_view

REPORT, PAGE, FIGURES, TABLES = "report", "index.html", "figures", "tables"

SECTIONS: tuple[tuple[str, Callable[[View], Section]], ...] = (
    ("Scaling at a glance", scaling.teaser),
    ("Does every token gain from looping?", tokens.gain_distribution),
    ("Accuracy of all variants", scaling.main_table),
    ("Depth and compute", scaling.depth_and_compute),
    ("Does the decider know?", tokens.decider_alignment),
)
"""In the order of the paper."""


def write_report(study_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of the study in `study_dir`, whatever stages have run; returns the page's path."""
    root = Path(study_dir)
    out = root / REPORT if out is None else Path(out)
    view = open_view(root)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("The report needs matplotlib: pip install 'tah2[plots]'.") from None
    with styled():
        sections = [_made(title, make, view) for title, make in SECTIONS]
        for section in sections:
            for block in section.blocks:
                _save(block, out)
        study = view.results.study
        text = page.render(str(study.get("title", "Study")), str(study.get("about", "")), sections, "Made by tah2.")
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f".{PAGE}.part"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, out / PAGE)
    return out / PAGE


def _made(title: str, make: Callable[[View], Section], view: View) -> Section:
    """The section, or what it lacks: a stage that has not run is no reason to have no report."""
    try:
        return make(view)
    except (ConfigError, FileNotFoundError) as problem:
        return Section(make.__name__.replace("_", "-"), title, (Missing(f"Missing: {problem}"),))


def _save(block: Block, out: Path) -> None:
    if isinstance(block, Figure):
        save_figure(block.drawing, out / FIGURES, block.name.removeprefix("figure-"))
        if block.numbers is not None:
            block.numbers.write_csv(out / TABLES)
    elif isinstance(block, Table):
        block.write_csv(out / TABLES)
