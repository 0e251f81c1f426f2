"""What is published can be computed again: summaries from verdicts, verdicts from raw responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tah2.config.backbone import BackboneConfig
from tah2.config.strict import ConfigError, build
from tah2.data.procedural import ProceduralConfig
from tah2.evals.flops import FlopsModel
from tah2.study.layout import Results, UnitResult
from tah2.study.publish import RECORDS, open_records, publish
from tah2.study.stages.respond import grade_record
from tah2.study.summary import summarise
from tah2.study.world import open_world
from tests.study.synthetic import VARIANTS, synthetic_study

POCKET = Path(__file__).resolve().parent.parent.parent / "results" / "pocket"
VARYING = ("made_by",)


def numbers_of(summary: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in summary.items() if name not in VARYING}


def test_published_records_give_the_same_summary(tmp_path: Path):
    root = synthetic_study(tmp_path / "study", VARIANTS[:1] + VARIANTS[8:9])
    with pytest.raises(ConfigError, match="no summary and report yet"):
        publish(root, tmp_path / "out")
    (root / "report").mkdir()
    (root / "report" / "index.html").write_text("<p>", encoding="utf-8")
    out = publish(root, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {"report", "summary.json", RECORDS}
    from tah2.study.layout import load_results

    with open_records(out / RECORDS) as results:
        assert numbers_of(summarise(results)) == numbers_of(summarise(load_results(root)))
        assert len(results.units[0].records()) == len(results.units[0].grades)


@pytest.fixture(scope="module")
def pocket():
    if not (POCKET / RECORDS).is_file():
        pytest.skip("no published pocket study")
    with open_records(POCKET / RECORDS) as results:
        yield results


@pytest.mark.slow
def test_the_committed_summary_comes_from_the_committed_records(pocket: Results):
    committed = json.loads((POCKET / "summary.json").read_text(encoding="utf-8"))
    assert numbers_of(summarise(pocket)) == numbers_of(committed)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["standard", "tah2-m2", "ouro-m2"])
def test_committed_verdicts_come_from_the_committed_responses(pocket: Results, variant: str):
    unit: UnitResult = pocket.of(variant)[0]
    world = open_world(build(ProceduralConfig, unit.info.recipe["procedural"]))
    asked = pocket.study["generate"]
    problems = {problem.id: problem for problem in world.problems(asked["problems"], asked["seed"])}
    shape = pocket.study["bases"][unit.info.base]["recipe"]["model"]["shape"]
    assert unit.config.loop is not None
    flops = FlopsModel(BackboneConfig.from_hf(shape), unit.config.loop, unit.info.ceiling)
    rows = {(row.problem, row.repeat): row for row in unit.grades}
    for record in unit.records():
        again = grade_record(record, problems[record.problem], world, flops, pocket.cutoffs)
        assert again == rows[record.key]
