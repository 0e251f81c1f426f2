"""The shipped studies: they build, a dry run prices them, and the paper's training FLOPs come out."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tah2.cli.frame import main
from tah2.compute import decode_per_token
from tah2.compute.published import TRAIN
from tah2.config.backbone import preset
from tah2.config.loop import LoopConfig
from tah2.study.config import load_study
from tah2.study.estimate import responses_asked
from tah2.study.plan import plan_study
from tah2.study.show import PUBLISHED_DEEPER

STUDIES = Path(__file__).resolve().parent.parent.parent / "recipes" / "studies"


def dry_run(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> dict[str, Any]:
    out = str(tmp_path / "out")
    assert main(["study", str(STUDIES / f"{name}.yaml"), "--dry-run", "--json", "--out", out, *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    return found


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_study_makes_a_plan(path: Path):
    plan = plan_study(load_study(path))
    assert plan.units
    assert plan.study.baseline in plan.study.variants


def test_the_paper_s_training_flops_come_out(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Within 0.1e18 of every published term."""
    rows = {row["name"]: row for row in dry_run("paper-1.7b", capsys, tmp_path)["training"]}
    names = {"standard": "standard", "huginn": "huginn-m{}", "ouro": "ouro-m{}"}
    names |= {"tah2-fixed": "tah2-fixed-m{}", "tah2": "tah2-m{}"}
    published = [(kind, depth, fwd_bwd, label) for kind, depth, _, fwd_bwd, label in (*TRAIN, *PUBLISHED_DEEPER)]
    assert len(published) == 10
    for kind, depth, forward_backward, label in published:
        row = rows[names[kind].format(depth)]
        assert abs(row["forward_backward"] / 1e18 - forward_backward) < 0.1, row["name"]
        assert abs(row["label_paper"] / 1e18 - label) < 0.1, row["name"]
        assert row["paper_total"] == pytest.approx((forward_backward + label) * 1e18)


def test_the_paper_s_runs_are_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    commands = dry_run("paper-1.7b", capsys, tmp_path)["commands"]
    trained = [line for line in commands if line.startswith("torchrun --nproc-per-node 8 -m tah2 sft ")]
    answered = [line for line in commands if line.startswith("tah2 eval ")]
    assert (len(trained), len(answered)) == (17, 19)
    assert sum("--max-depth 12" in line for line in answered) == 1


def test_answering_benchmarks_is_priced_too(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Every repeat of the paper's table of benchmarks, at half the token limit each."""
    repeats = 32 * (30 * 3 + 40) + 4 * (500 + 675) + 8 * (164 + 378 + 198) + 800
    assert responses_asked(load_study(STUDIES / "paper-1.7b.yaml")) == repeats
    (row,) = dry_run("paper-1.7b", capsys, tmp_path, "--variants", "standard", "--only", "generate")["plan"]
    per_token = decode_per_token(preset("qwen3-1.7b"), LoopConfig("standard"), (), 1 + 16384).total
    assert row["flops"] == pytest.approx(repeats * 16384 * per_token)


@pytest.mark.parametrize(("name", "variants"), [("paper-4b", 2), ("paper-8b", 2)])
def test_larger_backbones_are_priced_from_their_shapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, variants: int
):
    rows = dry_run(name, capsys, tmp_path)["training"]
    assert len(rows) == variants
    assert 1.7 < rows[1]["vs_baseline"] < 2.0


def test_the_pocket_study_covers_the_paper():
    study = load_study(STUDIES / "pocket.yaml")
    by_group: dict[str, list[str]] = {}
    for name, variant in study.variants.items():
        by_group.setdefault(variant.group, []).append(name)
    kinds = {(v.recipe["loop"]["kind"], v.recipe["loop"]["max_depth"]) for v in study.variants.values() if v.of is None}
    assert kinds >= {
        ("standard", 1),
        ("huginn", 3),
        ("huginn", 7),
        ("ouro", 2),
        ("ouro", 4),
        ("ouro-adaptive", 2),
        ("tah2-fixed", 2),
        ("tah2-fixed", 4),
        ("tah2", 2),
        ("tah2", 4),
        ("tah2", 8),
    }
    assert len(by_group["ablation"]) == 6
    assert len(by_group["ours"]) >= 3
    assert len(by_group["budget"]) >= 1
    assert {study.variants[name].ceiling for name in by_group["ceiling"]} == {4, 12}
    assert len(next(iter(study.bases.values())).seeds) == 3
    assert sum(variant.search for variant in study.variants.values()) == 6
    assert [n for n, v in study.variants.items() if not (v.search or v.rate_of or v.of)] == []


def test_a_plan_reads_as_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["study", str(STUDIES / "demo.yaml"), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "tah2 M=2" in shown
    assert "FLOPs to do" in shown
    assert "vs. baseline" in shown


def test_overrides_and_choices_reach_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = dry_run("pocket", capsys, tmp_path, "--variants", "tah2-m4", "--only", "train", "seeds=[3]")
    assert {row["name"] for row in found["plan"]} == {"search of tah2-m2", "tah2-m4"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--only", "trian"], "did you mean 'train'"),
        (["--variants", "thah2"], "No variant is called 'thah2'"),
        (["generate.problmes=3"], "did you mean 'problems'"),
    ],
)
def test_mistakes_are_told(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str):
    assert main(["study", str(STUDIES / "demo.yaml"), "--dry-run", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_conversations_come_from_the_command_line(tmp_path: Path):
    study = load_study(STUDIES / "smollm2.yaml", yaml.safe_load(f"data: {tmp_path}"))
    recipe = next(iter(plan_study(study).units.values())).recipe
    assert recipe["data"]["sources"] == [{"path": str(tmp_path)}]


PAGE = STUDIES.parent.parent / "docs" / "study.md"


def test_the_page_s_study_makes_a_plan(tmp_path: Path):
    block = re.search(r":caption: my-study.yaml\n\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "pocket").symlink_to(STUDIES.parent / "pocket")
    (tmp_path / "studies").mkdir()
    path = tmp_path / "studies" / "my-study.yaml"
    path.write_text(block.group(1), encoding="utf-8")
    plan = plan_study(load_study(path))
    assert {unit.variant for unit in plan.units.values()} == {"standard", "tah2-m2", "tah2-m4", "tah2-m4-at-8"}
    assert all(unit.recipe["budget"] == {"steps": 100} for unit in plan.units.values())


@pytest.mark.parametrize("line", re.findall(r"^tah2 (study .+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
def test_the_page_s_commands_are_understood(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(STUDIES.parent.parent)
    words = [word for word in shlex.split(line) if word != "--dry-run"]
    assert main([*words, "--dry-run"]) == 0
    assert "stages done" in capsys.readouterr().out
