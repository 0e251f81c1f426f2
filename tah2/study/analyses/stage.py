"""The study's stage that analyses every trained model whose variant a figure shows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tah2.config.strict import ConfigError
from tah2.data.store import TokenStore
from tah2.model.loop import LoopedDecoder
from tah2.study.analyses.inputs import (
    DataChoice,
    Subject,
    open_checkpoint,
    open_documents,
    open_tokenizer,
    tag_names,
)
from tah2.study.analyses.run import Ask, analyse
from tah2.study.layout import Results, UnitResult, load_results

ANALYSES = "analyses"
SEQUENCES = 100
"""Validation documents of an attention analysis, as many as the paper's; the others see the whole set"""
FLOPS = {"cpu": 2e12, "cuda": 5e15}
"""What one analysis of one model may cost on a device: large models see fewer documents"""


def run_analyses(root: str | Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Analyse the models of the study at `root`; results that are there already stay. Returns their folder."""
    root = Path(root)
    results = load_results(root)
    for unit, name in wanted(results):
        path = root / ANALYSES / unit.info.id / f"{name}.json"
        if path.is_file():
            continue
        try:
            found = analyse_unit(unit, name, path.parent, **results.study["validate"])
        except (ConfigError, ValueError) as problem:
            say(f"{unit.info.title}, {name}: {problem}")
            continue
        write_json(path, found)
        say(f"{unit.info.id}: {name}")
    return root / ANALYSES


def wanted(results: Results) -> Iterator[tuple[UnitResult, str]]:
    """Every unit of the main table with what applies to its loop; attention of the deepest TaH2 alone."""
    deepest = max(results.kind("tah2"), default=0)
    for variant in results.group("main"):
        for unit in results.of(variant):
            loop, depth = unit.info.loop, unit.info.max_depth
            if loop == "standard" or not (unit.model_path / "config.json").is_file():
                continue
            if loop != "tah2":
                yield unit, "gains"
            if loop == "tah2":
                yield unit, "alignment"
                yield unit, "depths"
            if loop == "tah2" and depth == deepest:
                yield unit, "attention"


def analyse_unit(unit: UnitResult, name: str, folder: Path, samples: int, seed: int) -> dict[str, Any]:
    """One analysis of one trained model on the study's validation data, the same for all seeds."""
    documents = min(SEQUENCES, samples) if name == "attention" else samples
    return analyse(name, subject_of(unit, documents, seed), Ask(folder=folder))


def subject_of(unit: UnitResult, documents: int, seed: int) -> Subject:
    """`seed` is that of the study's validation set, not the one of the unit's training data."""
    tokenizer = open_tokenizer(unit.model_path)
    recipe = {name: unit.info.recipe[name] for name in ("procedural", "data") if unit.info.recipe.get(name)}
    if "procedural" in recipe:
        recipe["procedural"] = {**recipe["procedural"], "seed": seed}
    choice = DataChoice("the study's data", samples=documents, max_tokens=16384, recipe=recipe)
    decoder = open_checkpoint(unit.model_path, "cuda" if torch.cuda.is_available() else "cpu").model
    store = affordable(open_documents(choice, tokenizer), decoder)
    return Subject(unit.info.id, choice.data, decoder, store, tag_names(store), tokenizer)


def affordable(store: TokenStore, decoder: LoopedDecoder) -> TokenStore:
    """The first documents of `store` that `FLOPS` pay for, every token running to the ceiling; at least one."""
    weights = sum(parameter.numel() for parameter in decoder.parameters())
    tokens = FLOPS[decoder.head_weight.device.type] / (2 * weights * decoder.ceiling())
    count = int((store.lengths.cumsum() <= tokens).sum())
    return store.select(range(max(1, min(count, len(store)))))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """The whole file, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(partial, path)
