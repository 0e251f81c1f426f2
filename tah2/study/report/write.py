"""`write_report`: a study's folder -> one page, its figures as files and its tables as CSV."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tah2 import __version__
from tah2.config.strict import ConfigError
from tah2.study.report import page
from tah2.study.report.blocks import Block, Figure, Missing, Raw, Section, Table
from tah2.study.report.sections import account, choices, further, inside, scaling, serving, tokens
from tah2.study.report.style import styled
from tah2.study.report.svg import save_figure
from tah2.study.report.view import View, open_view

LACKING = "This section could not be made."
REPORT, PAGE, FIGURES, TABLES = "report", "index.html", "figures", "tables"

SECTIONS: tuple[tuple[str, Callable[[View], Section]], ...] = (
    ("What holds", account.claims),
    ("Scaling at a glance", scaling.teaser),
    ("Does every token gain from looping?", tokens.gain_distribution),
    ("Accuracy of all variants", scaling.main_table),
    ("Depth and compute", scaling.depth_and_compute),
    ("Runtime efficiency", serving.runtime),
    ("Additional sizes", choices.sizes),
    ("Design choices", choices.design),
    ("What is ours, removed one at a time", choices.removed),
    ("Does the decider know?", tokens.decider_alignment),
    ("Training FLOPs", further.training_flops),
    ("Inference ceilings other than the training one", further.ceilings),
    ("Validation loss during post-training", further.validation_curves),
    ("Every family of problems", further.families),
    ("Majority votes", further.votes),
    ("Depth token by token", inside.depth_maps),
    ("Attention across iterations", inside.cross_attention),
    ("Every run", account.all_runs),
    ("How it was made", account.how_made),
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
        made = [_made(title, make, view) for title, make in SECTIONS]
        sections = [section for section in made if not section.absent]
        for section in sections:
            for block in section.blocks:
                _save(block, out)
        study = view.results.study
        text = page.render(str(study.get("title", "Study")), str(study.get("about", "")), sections, _footer(made))
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f".{PAGE}.part"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, out / PAGE)
    return out / PAGE


def _footer(sections: Sequence[Section]) -> str:
    """What this study does not ask for is said once, at the end."""
    absent = [section.title for section in sections if section.absent]
    words = f" Not part of this study: {'; '.join(absent)}." if absent else ""
    return f"Made by tah2 {__version__} from the raw records of the study's folder.{words}"


def _made(title: str, make: Callable[[View], Section], view: View) -> Section:
    """The section, or why there is none: whatever is the matter with one is no reason to have no report."""
    try:
        return make(view)
    except Exception as problem:
        if os.environ.get("TAH2_DEBUG", "0") not in ("", "0"):
            raise
        what = str(problem) if isinstance(problem, ConfigError) else f"{type(problem).__name__}: {problem}"
        return Section(make.__name__.replace("_", "-"), title, (Missing(f"{LACKING} {what}"),))


def _save(block: Block, out: Path) -> None:
    if isinstance(block, Figure):
        save_figure(block.drawing, out / FIGURES, block.name.removeprefix("figure-"))
        if block.numbers is not None:
            block.numbers.write_csv(out / TABLES)
    elif isinstance(block, Table):
        block.write_csv(out / TABLES)
    elif isinstance(block, Raw) and block.table is not None:
        block.table.write_csv(out / TABLES)
