"""The last stages: analyses and summary.json, then the report."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tah2.study.layout import STUDY, SUMMARY, load_results
from tah2.study.ledger import digest_files
from tah2.study.plan import Task
from tah2.study.plugins import ANALYSES, REPORT, VERSION, imported
from tah2.study.summary import summarise
from tah2.train.summary import write_summary

if TYPE_CHECKING:
    from tah2.study.shop import Shop, Tell

FOLDER, REPORT_FOLDER, OF_MODEL = "analyses", "report", "model.txt"


def analyse_study(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    """Numbers first: they need no model, and a failing analysis leaves them there."""
    write_summary(shop.root / SUMMARY, summarise(load_results(shop.root)))
    folder = shop.root / FOLDER
    forget_old_analyses(shop, folder)
    for number, name in enumerate(ANALYSES):
        tell(number / len(ANALYSES))
        imported(name)(shop.root)
        stamp_analyses(shop, folder)
    write_summary(shop.root / SUMMARY, summarise(load_results(shop.root)))  # now with claims about what was found
    return digest_files([shop.root / SUMMARY, *files_in(folder)])


def forget_old_analyses(shop: Shop, folder: Path) -> None:
    """What was found of a model that has been trained anew since goes; so does what was left half done."""
    for own, model in _of_units(shop, folder):
        stamp = own / OF_MODEL
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != model:
            shutil.rmtree(own)


def stamp_analyses(shop: Shop, folder: Path) -> None:
    """Note the model that each unit's analyses were made of."""
    for own, model in _of_units(shop, folder):
        (own / OF_MODEL).write_text(model, encoding="utf-8")


def _of_units(shop: Shop, folder: Path) -> list[tuple[Path, str]]:
    """The folders of analyses that are there, with what they are made of now: the model's digest and their version."""
    found = [(folder / unit.id, shop.produced(f"train:{unit.of or unit.id}")) for unit in shop.plan.units.values()]
    return [(own, f"{model} {VERSION}") for own, model in found if own.is_dir()]


def report_study(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    for number, name in enumerate(REPORT):
        tell(number / len(REPORT))
        imported(name)(shop.root)
    return digest_files([shop.root / STUDY, *files_in(shop.root / REPORT_FOLDER)])


def files_in(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
