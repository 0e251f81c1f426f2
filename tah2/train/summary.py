"""The machine-readable end of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(partial, path)
