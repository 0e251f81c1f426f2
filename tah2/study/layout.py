"""Where a study keeps what it made, and how to read it back.

    DIR/
      study.json                 what was asked: the resolved study, and every unit in the order of the tables
      bases/NAME-bSEED/          a base per seed: train-0/, train-1/, ... the stages of its curriculum
      units/ID/
        unit.json                who it is (`UnitInfo`), and the whole recipe that it was trained by
        train/                   the trainer's own folder: metrics.jsonl, summary.json, model/
        validate.json            losses and depths on the validation set (`tah2.train.validate`), by tag too
        samples/TASK.jsonl       one `SampleRecord` a line, TASK being the family of problems
        eval/                    instead of samples/ where public benchmarks are answered: a run of `tah2 eval`
        grades.jsonl             one `GradeRow` a line
        stages/STAGE.json        what the stage was made from (its key), and how long it took
      runtime.json               latency and tokens per second, measured side by side
      summary.json               the machine-readable results
      analyses/, report/         what the last two stages make of it

A unit is one trained model, or one of another unit's models under another inference ceiling (`UnitInfo.of`). Everything
is written whole or not at all, so whatever is there can be read; `load_results` reads it lazily.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tah2.config.strict import ConfigError, build, suggestion

if TYPE_CHECKING:
    from tah2.evals.records import SampleRecord
    from tah2.train.config import TrainConfig

STUDY, UNIT, VALIDATE, GRADES, RUNTIME, SUMMARY = (
    "study.json",
    "unit.json",
    "validate.json",
    "grades.jsonl",
    "runtime.json",
    "summary.json",
)
UNITS, BASES, TRAIN, SAMPLES, STAGES, MODEL, EVAL = "units", "bases", "train", "samples", "stages", "model", "eval"


@dataclass(frozen=True)
class UnitInfo:
    """One model of the study, as `unit.json` holds it."""

    id: str
    """The name of its folder."""
    variant: str
    """The variant's name in the study file; units of a variant differ in their seeds alone."""
    title: str
    """The variant for people, as tables and figures name it."""
    group: str
    """main, ablation, ours, budget, size, ceiling or search: which table it belongs to."""
    loop: str
    """The kind of loop."""
    max_depth: int
    """M: the ceiling it was trained under."""
    ceiling: int
    """The ceiling it is evaluated under; M but for the group `ceiling`."""
    base: str
    """The name of the base that it starts from."""
    base_seed: int
    seed: int
    """Of post-training: sample order, decisions, start state."""
    model: str
    """The trained model's folder, relative to the study's."""
    learning_rate: float
    of: str | None = None
    """The unit whose model this one evaluates under another ceiling."""
    differs: str = ""
    """An ablation in words: what is not as in TaH2."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The training recipe, resolved."""


@dataclass(frozen=True)
class GradeRow:
    """One graded response. Cut off at c tokens, it is right if it is `correct` and its length is at most c."""

    task: str
    problem: str
    repeat: int
    correct: bool
    """The final answer is right, says the world's verifier."""
    exact: bool
    """The whole trace is right."""
    tokens: int
    """Output tokens, the end token included."""
    finished: bool
    """It ended by itself, within the token limit."""
    flops: int
    """Decoding FLOPs of the whole response."""
    flops_at: tuple[int, ...]
    """Decoding FLOPs of the response cut off at each of the study's `cutoffs`."""
    depth: float
    """Mean depth over the output tokens."""
    answer: str = ""
    """What is voted on for cons@n; empty where the response gives no answer."""


class UnitResult:
    """What one unit left behind; every property reads its file when first asked."""

    def __init__(self, root: Path, info: UnitInfo) -> None:
        self.root, self.info = root, info
        self.folder = root / UNITS / info.id

    def __repr__(self) -> str:
        return f"UnitResult({self.info.id})"

    @property
    def model_path(self) -> Path:
        return self.root / self.info.model

    @property
    def config(self) -> TrainConfig:
        """The recipe as the trainer read it; its `procedural` or `data` section says what the data are."""
        from tah2.train.config import TrainConfig

        return build(TrainConfig, self.info.recipe)

    @cached_property
    def validation(self) -> dict[str, float]:
        """`loss`, `depth/mean`, `depth/m/loss`, `depth/m/share`, `tag/k/loss` along inference's routes."""
        return _read(self.folder / VALIDATE)

    @cached_property
    def training(self) -> dict[str, Any]:
        """The trainer's summary: steps, seconds, tokens, flops (what ran), flops_paper, validation."""
        return _read(self._trained_in / "summary.json")

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """Validations during training, in order of `step`; names as in `validation`."""
        return [record for record in self.log if record.get("kind") == "validation"]

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """Every record of the training log."""
        return list(_lines(self._trained_in / "metrics.jsonl"))

    @cached_property
    def grades(self) -> tuple[GradeRow, ...]:
        """Empty where the study asks for no responses."""
        path = self.folder / GRADES
        return tuple(build(GradeRow, row) for row in _lines(path)) if path.is_file() else ()

    def records(self, task: str | None = None) -> list[SampleRecord]:
        """Raw responses of one family, or of all."""
        from tah2.evals.records import RecordFile

        found = sorted([*(self.folder / SAMPLES).glob("*.jsonl"), *(self.folder / EVAL / SAMPLES).glob("*.jsonl")])
        paths = [path for path in found if task in (None, path.stem)]
        return [record for path in paths for record in RecordFile(path).read()]

    @property
    def _trained_in(self) -> Path:
        """The trainer's folder: its own, or that of the unit whose model it evaluates."""
        return self.root / UNITS / (self.info.of or self.info.id) / TRAIN


class Results:
    """A study's folder, read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        asked = _read(root / STUDY)
        self.study: dict[str, Any] = asked["study"]
        """The resolved study file."""
        self.command: str = asked.get("command", "tah2 study")
        ids: list[str] = asked["units"]
        found = [root / UNITS / name / UNIT for name in ids]
        infos = [build(UnitInfo, _read(path)) for path in found if path.is_file()]
        self.all_units = tuple(UnitResult(root, info) for info in infos)
        """Those of the learning-rate search too."""
        self.units = tuple(unit for unit in self.all_units if unit.info.group != "search")

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """Output-token cutoffs of the scaling curves, ascending; `GradeRow.flops_at` is aligned with them."""
        return tuple(self.study["generate"]["cutoffs"])

    @property
    def fitted(self) -> int | None:
        """Over how many of the cutoffs slopes are fitted; over all where the study does not say."""
        limit = self.study["generate"].get("fit_to")
        return None if limit is None else sum(cutoff <= limit for cutoff in self.cutoffs)

    @property
    def baseline(self) -> str:
        """The variant that others are measured against."""
        return str(self.study["baseline"])

    @property
    def variants(self) -> tuple[str, ...]:
        """Names in the order of the study file."""
        return tuple(dict.fromkeys(unit.info.variant for unit in self.units))

    def of(self, variant: str) -> tuple[UnitResult, ...]:
        """The units of a variant, one per pair of seeds."""
        found = tuple(unit for unit in self.units if unit.info.variant == variant)
        if not found:
            raise ConfigError(f"The study has no variant {variant!r}{suggestion(variant, self.variants)}.")
        return found

    def group(self, name: str) -> tuple[str, ...]:
        """The variants of one group: main, ablation, ours, budget, size or ceiling."""
        return tuple(dict.fromkeys(unit.info.variant for unit in self.units if unit.info.group == name))

    def kind(self, loop: str, group: str = "main") -> dict[int, str]:
        """The variants of one loop kind in a group, by ceiling M, ascending."""
        units = [unit.info for unit in self.units if (unit.info.loop, unit.info.group) == (loop, group)]
        return {info.max_depth: info.variant for info in sorted(units, key=lambda info: info.max_depth)}

    @property
    def tasks(self) -> tuple[str, ...]:
        """Families of problems with responses, in alphabetic order."""
        return tuple(sorted({row.task for unit in self.units for row in unit.grades}))

    @cached_property
    def runtime(self) -> list[dict[str, Any]]:
        """One row per variant and batch size: variant, batch, latency_seconds, tokens_per_second, flops_per_token."""
        path = self.root / RUNTIME
        return list(_read(path)["rows"]) if path.is_file() else []

    @cached_property
    def summary(self) -> dict[str, Any]:
        return _read(self.root / SUMMARY)


def load_results(folder: str | Path) -> Results:
    """The results under `folder`, whatever stages have run so far."""
    folder = Path(folder)
    if not (folder / STUDY).is_file():
        raise ConfigError(f"{folder} holds no study: name the folder that 'tah2 study' wrote to ('--out').")
    return Results(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: the stage that writes it has not run.") from None
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())
