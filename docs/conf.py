"""Sphinx configuration; the visibility pictures are drawn when the pages are built."""

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

import tah2

HERE = Path(__file__).resolve().parent

project = "tah2"
author = "The tah2 authors"
copyright = "2026, the tah2 authors"
release = version = tah2.__version__

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated"]
nitpicky = True

html_theme = "furo"
html_title = f"tah2 {tah2.__version__}"
html_copy_source = False


def draw_pictures(app: Sphinx) -> None:
    sys.path.insert(0, str(HERE))
    from pictures import draw_all

    draw_all(HERE / "_generated")


def add_report(app: Sphinx, error: Exception | None) -> None:
    """The committed report of the pocket study stands beside the pages."""
    if error is None and app.builder.name == "html":
        shutil.copytree(HERE.parent / "results/pocket/report", Path(app.outdir) / "pocket-report", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", draw_pictures)
    app.connect("build-finished", add_report)
