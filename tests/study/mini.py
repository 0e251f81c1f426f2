"""A miniature study: every stage and every kind of dependency, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tah2.config.strict import merge
from tah2.study.config import StudySection, load_study
from tests.train.runs import RECIPE, SHAPE

SHARED: dict[str, Any] = {
    "batch": {"samples": 4, "tokens_per_micro_batch": 256},
    "budget": {"steps": 4},
    "optimizer": {"learning_rate": 1e-2},
    "validation": {"every": 2},
    "checkpoint": {"every": 2, "asynchronous": False},
    "logging": {"every": 1},
    "system": {"precision": "fp32", "threads": 1},
    "procedural": {"task": "stop-chase", "samples": 40, "validation_samples": 4},
}
STUDY: dict[str, Any] = {
    "title": "A miniature",
    "recipe": merge(SHARED, {"model": {"start": {"steps": 5}}}),
    "bases": {
        "tiny": {
            "stages": [
                merge(SHARED, {"model": {"shape": SHAPE}, "loop": {"kind": "standard"}, "procedural": {"base": True}}),
                merge(SHARED, {"loop": {"kind": "standard"}}),
            ],
            "seeds": [0, 1],
        }
    },
    "baseline": "standard",
    "search": {"learning_rates": [1e-2, 2e-2]},
    "variants": {
        "standard": {"title": "Standard", "recipe": {"loop": {"kind": "standard"}}, "search": True},
        "ouro-m2": {"title": "Ouro", "recipe": {"loop": {"kind": "ouro", "max_depth": 2}}, "rate_of": "standard"},
        "ouro-gate": {
            "title": "Ouro with gate",
            "after": "ouro-m2",
            "base_seeds": [0],
            "recipe": {"loop": {"kind": "ouro-adaptive", "max_depth": 2}},
        },
        "tah2-m2": {
            "title": "TaH2 M=2",
            "recipe": {
                "loop": RECIPE["loop"],
                "optimizer": {"gate_learning_rate": 2e-2},
            },
        },
        "tah2-at-3": {"title": "TaH2 at 3", "group": "ceiling", "of": "tah2-m2", "ceiling": 3, "base_seeds": [0]},
    },
    "validate": {"samples": 8},
    "generate": {"problems": 5, "samples": 2, "max_tokens": 12, "cutoffs": [4, 8], "temperature": 1.0, "batch": 4},
    "runtime": {"variants": ["standard", "tah2-m2"], "batches": [1, 2], "problems": 1, "rounds": 2},
}


def write_study(folder: Path, *changes: dict[str, Any]) -> Path:
    """The miniature as a file, with `changes` merged over it."""
    study = STUDY
    for change in changes:
        study = merge(study, change)
    path = folder / "mini.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


def mini(folder: Path, *changes: dict[str, Any]) -> StudySection:
    return load_study(write_study(folder, *changes))
