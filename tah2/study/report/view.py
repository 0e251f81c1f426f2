"""A study as the report sees it: variants with their looks, and every number computed once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.evals.statistics import Interval
from tah2.study import numbers
from tah2.study.layout import Results, UnitInfo, UnitResult
from tah2.study.numbers import Runs
from tah2.study.report.blocks import Cell
from tah2.study.report.style import Look, look_of

ANALYSES = "analyses"
NOTHING = "–"


class View:
    """`Results` with what tables and figures ask of them; anything may be missing."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._runs: dict[tuple[str, str | None], Runs | None] = {}

    def units(self, variant: str) -> tuple[UnitResult, ...]:
        return self.results.of(variant)

    def info(self, variant: str) -> UnitInfo:
        return self.units(variant)[0].info

    def title(self, variant: str) -> str:
        return self.info(variant).title

    def key(self, variant: str) -> tuple[str, int]:
        """(loop kind, M): how the paper's numbers are found."""
        return self.info(variant).loop, self.info(variant).max_depth

    def look(self, variant: str) -> Look:
        info = self.info(variant)
        alike = [other for other in self.results.group(info.group) if self.key(other) == self.key(variant)]
        return look_of(info.loop, info.max_depth, alike.index(variant) if variant in alike else 0)

    @property
    def group(self) -> dict[str, tuple[str, ...]]:
        return {name: self.results.group(name) for name in ("main", "ablation", "ours", "budget", "size", "ceiling")}

    def plans(self, group: str) -> bool:
        """Does the study's file name a variant of this group, whether or not it has been run?"""
        asked = self.results.study.get("variants") or {}
        return any((variant or {}).get("group", "main") == group for variant in asked.values())

    @cached_property
    def baseline(self) -> str | None:
        """None where not one of its units is there yet."""
        return self.results.baseline if self.results.baseline in self.results.variants else None

    @cached_property
    def subject(self) -> str | None:
        """The variant that the study is about: its own choice, or the shallowest TaH2 of the main table."""
        chosen = self.results.study.get("main")
        if chosen in self.results.variants:
            return str(chosen)
        return next(iter(self.results.kind("tah2").values()), None)

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """One variant of each kind, for figures that cannot show all: the shallowest of each, in order."""
        kinds = ("standard", "huginn", "ouro", "ouro-adaptive", "tah2")
        firsts = [next(iter(self.results.kind(kind).values()), None) for kind in kinds]
        return tuple(dict.fromkeys(variant for variant in firsts if variant is not None))

    def runs(self, variant: str | None, task: str | None = None) -> Runs | None:
        """None where there are no responses."""
        if variant is None:
            return None
        if (variant, task) not in self._runs:
            try:
                self._runs[variant, task] = numbers.runs_of(self.results, variant, task)
            except (ConfigError, FileNotFoundError):
                self._runs[variant, task] = None
        return self._runs[variant, task]

    def analysis(self, unit: UnitResult, name: str) -> dict[str, Any] | None:
        path = self.results.root / ANALYSES / unit.info.id / f"{name}.json"
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found

    def analyses(self, variant: str, name: str) -> list[dict[str, Any]]:
        """One per unit that was analysed."""
        found = [self.analysis(unit, name) for unit in self.units(variant)]
        return [each for each in found if each is not None]

    def flops_ratio(self, variant: str) -> float | None:
        """Decoding FLOPs per generated token, as a multiple of the baseline's."""
        mine = numbers.flops_per_token(self.units(variant))
        theirs = None if self.baseline is None else numbers.flops_per_token(self.units(self.baseline))
        return None if mine is None or theirs is None else mine / theirs

    @cached_property
    def made_by(self) -> dict[str, Any]:
        try:
            return dict(self.results.summary.get("made_by", {}))
        except ConfigError:
            return {}


def open_view(root: Path) -> View:
    from tah2.study.layout import load_results

    return View(load_results(root))


def percent(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """With its sign, and a true minus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def accuracy_cell(interval: Interval, strong: bool = False) -> Cell:
    """`34.2 (31.0–37.5)` in percent."""
    return Cell(percent(interval.estimate), between(interval), strong)


def between(interval: Interval, scale: float = 100.0, digits: int = 1) -> str:
    if math.isnan(interval.low):
        return ""
    return f"{scale * interval.low:.{digits}f} to {scale * interval.high:.{digits}f}".replace("-", "−")


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def short(flops: float) -> str:
    """`15.0 MFLOPs`"""
    for size, unit in ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs")):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops / 1e3:.3g} kFLOPs"


def between_numbers(low: float, high: float, digits: int) -> str:
    return f"{low:.{digits}f} to {high:.{digits}f}".replace("-", "−")
