"""The last stages: analyses and summary.json, then the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tah2.study.layout import STUDY, SUMMARY, load_results
from tah2.study.ledger import digest_files
from tah2.study.plan import Task
from tah2.study.plugins import ANALYSES, REPORT, plugged
from tah2.study.summary import summarise
from tah2.train.summary import write_summary

if TYPE_CHECKING:
    from tah2.study.shop import Shop, Tell


def analyse_study(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    results, folder = load_results(shop.root), shop.root / "analyses"
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(ANALYSES):
        plugged(name)(results, folder)
        tell((number + 1) / (len(ANALYSES) + 1))
    write_summary(shop.root / SUMMARY, summarise(results))
    return digest_files([shop.root / SUMMARY, *(path for path in folder.rglob("*") if path.is_file())])


def report_study(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    results, folder = load_results(shop.root), shop.root / "report"
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(REPORT):
        plugged(name)(results, folder)
        tell((number + 1) / len(REPORT))
    return digest_files([shop.root / STUDY, *(path for path in folder.rglob("*") if path.is_file())])
