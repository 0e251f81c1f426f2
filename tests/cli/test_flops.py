"""`tah2 flops` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tah2.cli.flops import EXAMPLES, main
from tah2.config.strict import ConfigError

DECODE = ["decode", "--backbone", "qwen3-1.7b", "--mean-keys", "15691"]
TRAIN = ["train", "--backbone", "qwen3-1.7b", "--tokens", "3.3e9", "--mean-keys", "3406"]
SMOLLM = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(config: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(tmp_path)

    return write


def test_params_names_the_backbone_and_every_added_part(report: Any):
    counts = report("params", "--backbone", "qwen3-4b", "--loop", "tah2")
    assert counts["backbone"] == 4022468096
    assert counts["added"] == {"updater": 32778240, "decider": 39334400}
    assert counts["total"] == counts["backbone"] + counts["added_total"]
    assert counts["fraction"] == pytest.approx(0.0176, abs=5e-5)


def test_decode_reports_flops_per_token_and_where_they_go(report: Any):
    cost = report(*DECODE, "--loop", "tah2", "--max-depth", "2", "--continue", "0.1925")
    assert cost["per_token"] == pytest.approx(8.59e9, abs=0.005e9)
    assert cost["vs_standard"] == pytest.approx(1.22, abs=0.005)
    assert sum(cost["breakdown"].values()) == pytest.approx(cost["per_token"])


def test_train_reports_labels_twice(report: Any):
    cost = report(*TRAIN, "--loop", "tah2", "--max-depth", "2", "--continue", "0.449")
    assert cost["forward_backward"] == pytest.approx(62.8e18, abs=0.05e18)
    assert cost["label_paper"] == pytest.approx(15.2e18, abs=0.05e18)
    assert cost["label_actual"] < cost["label_paper"]
    assert cost["total_paper"] == cost["forward_backward"] + cost["label_paper"]
    assert cost["total_actual"] == cost["forward_backward"] + cost["label_actual"]
    assert cost["vs_standard"] == pytest.approx(1.87, abs=0.005)
    assert cost["vs_standard_actual"] <= 1.71


def test_standard_is_once_standard_at_any_ceiling(report: Any):
    assert report(*DECODE, "--loop", "standard", "--max-depth", "8")["vs_standard"] == 1
    assert report(*TRAIN, "--loop", "standard")["vs_standard_actual"] == 1


def test_options_of_the_loop_can_be_set(report: Any):
    wide = report("params", "--backbone", "qwen3-1.7b", "--loop", "tah2")
    narrow = report("params", "--backbone", "qwen3-1.7b", "--loop", "tah2", "--set", "decider-width=128")
    assert narrow["added"]["updater"] == wide["added"]["updater"]
    assert wide["added"]["decider"] - narrow["added"]["decider"] == 3 * 2048 * (2048 - 128)


def test_a_folder_with_a_hugging_face_config_is_a_backbone(report: Any, folder: Any):
    ours = report("params", "--backbone", folder(SMOLLM), "--loop", "huginn")
    published = report("params", "--backbone", "smollm2-135m", "--loop", "huginn")
    assert ours["backbone"] == published["backbone"]
    assert ours["added"] == published["added"]


def test_a_looped_checkpoint_brings_its_own_loop(report: Any, folder: Any):
    loop = {"kind": "tah2", "max_depth": 4, "updater_width": 64, "decider_width": 64}
    name = folder({"model_type": "looped", "backbone": SMOLLM, "loop": loop})
    own = report("decode", "--backbone", name, "--mean-keys", "100", "--continue", "0.5", "0.25", "0.1")
    assert (own["loop"], own["max_depth"]) == ("tah2", 4)
    lower = report("decode", "--backbone", name, "--max-depth", "2", "--mean-keys", "100", "--continue", "0.5")
    assert lower["per_token"] < own["per_token"]
    assert lower["breakdown"]["gate"] < own["breakdown"]["gate"]
    other = report("decode", "--backbone", name, "--loop", "ouro", "--mean-keys", "100")
    assert (other["loop"], other["max_depth"]) == ("ouro", 2)


def test_without_json_the_report_is_readable(capsys: pytest.CaptureFixture[str]):
    assert main([*TRAIN, "--loop", "tah2", "--continue", "0.449"]) == 0
    out = capsys.readouterr().out
    assert "62.81 E" in out
    assert "1.703x" in out
    assert main(["params", "--backbone", "qwen3-1.7b", "--loop", "tah2"]) == 0
    out = capsys.readouterr().out
    assert "20.98 M" in out
    assert "2.612%" in out


def test_the_table_sets_published_beside_ours(report: Any, capsys: pytest.CaptureFixture[str]):
    rows = report("table")["rows"]
    assert {row["table"] for row in rows} == {"parameters", "per call", "decode, per token", "training"}
    assert main(["table"]) == 0
    assert "published" in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(EXAMPLES))
def test_help_teaches_an_example_that_works(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"tah2 flops {command}" in capsys.readouterr().out
    program, name, *arguments = EXAMPLES[command].split()
    assert (program, name) == ("tah2", "flops")
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["params", "--backbone", "qwen3-17b", "--loop", "tah2"], "did you mean 'qwen3-1.7b'"),
        (["params", "--backbone", "qwen3-1.7b", "--loop", "tah"], "did you mean 'tah2'"),
        (["params", "--backbone", "./nowhere", "--loop", "tah2"], "no folder './nowhere'"),
        (["params", "--backbone", "qwen3-1.7b"], "--loop"),
        ([*DECODE, "--loop", "tah2"], "1 continue fractions"),
        ([*DECODE, "--loop", "ouro", "--continue", "0.5"], "leave the continue fractions out"),
        ([*DECODE, "--loop", "tah2", "--set", "width"], "KEY=VALUE"),
        ([*DECODE, "--loop", "tah2", "--set", "decider-widht=4"], "did you mean 'decider_width'"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        main(arguments)
    assert "\n" not in str(error.value)


def test_a_config_that_describes_no_backbone_is_refused(folder: Any):
    incomplete = {key: value for key, value in SMOLLM.items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match="lacks 'hidden_size'"):
        main(["params", "--backbone", folder(incomplete), "--loop", "tah2"])
