"""Runs from end to end on a tiny procedural task: what they learn, leave behind, and refuse."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tah2
from tah2.config.strict import ConfigError
from tah2.data.procedural import load_procedural
from tah2.model.hf import LoopedForCausalLM
from tah2.train import metrics
from tah2.train import trainer as trainer_module
from tah2.train.parallel import World, compile_blocks
from tah2.train.trainer import Trainer, backbone_parameters, train
from tests.train.runs import PLAIN, RECIPE, config, curve, records, run_one_step, same_curves, weights

STEP_METRICS = {
    "loss",
    "loss/prediction",
    "loss/decider",
    "accuracy",
    "depth/mean",
    "depth/1/loss",
    "depth/1/share",
    "depth/2/share",
    "decider/1/continue_rate",
    "decider/1/label_rate",
    "decider/1/agreement",
    "decider/1/cutoff",
    "decider/1/beta",
    "decider/1/gain",
    "decider/1/absent_class",
    "compute/flops",
    "compute/flops_paper",
    "compute/label_share_actual",
    "compute/lookahead_tokens_actual",
    "compute/lookahead_tokens_paper",
    "data/tokens",
    "data/supervised_tokens",
    "speed/tokens_per_second",
    "optim/lr",
    "optim/grad_norm",
    "memory/peak_bytes",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = Trainer(config(tmp_path_factory.mktemp("runs") / "finished"), World())
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def out(finished: Trainer) -> Path:
    return finished.config.out


def test_a_run_learns(out: Path):
    losses = [record["loss/prediction"] for record in records(out, "step")]
    assert [record["step"] for record in records(out, "step")] == list(range(1, 10))
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.3


def test_a_run_leaves_metrics_checkpoints_a_summary_and_a_model(out: Path):
    assert {path.name for path in out.iterdir()} == {"metrics.jsonl", "checkpoints", "summary.json", "model"}
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-000008", "step-000009"}
    assert [record["step"] for record in records(out, "checkpoint")] == [2, 4, 6, 8, 9]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["steps"]) == ("finished", 9, 9)
    assert summary["config"]["loop"]["max_depth"] == 2
    assert summary["tokens"] == sum(record["data/tokens"] for record in records(out, "step"))
    assert summary["flops"] == sum(record["compute/flops"] for record in records(out, "step"))
    assert summary["flops_paper"] > summary["flops"] > 0
    assert summary["validation"]["step"] == 9
    assert [record["step"] for record in records(out, "validation")] == [5, 9]


def test_every_step_reports_the_documented_metrics(out: Path):
    documented = _documented_names()
    for record in records(out, "step"):
        assert record.keys() >= STEP_METRICS - ({"decider/1/cutoff"} if record["decider/1/absent_class"] else set())
        unknown = {_general(name) for name in record} - documented - {"kind", "step", "time"}
        assert not unknown


def _documented_names() -> set[str]:
    """The names in the table of `tah2.train.metrics`, its abbreviations (`gain, gain_std`, `.._paper`) spelled out."""
    names = {"compute/label_share_paper", "compute/lookahead_tokens_paper"}
    folder = ""
    for row in re.findall(r"^\| (`.+?) \|", str(metrics.__doc__), re.MULTILINE):
        for name in re.findall(r"`([\w/.]+)`", row):
            names.add(name if "/" in name or not folder else folder + name)
            folder = name.rpartition("/")[0] + "/" if "/" in name else folder
    return names | {"loss", "accuracy"}


def _general(name: str) -> str:
    parts = ["m" if part.isdecimal() else part for part in name.split("/")]
    return "/".join(parts)


def test_the_data_are_described(out: Path):
    texts = [record["text"] for record in records(out, "message")]
    assert any(text.startswith("Task stop-chase: 100 samples") and "10 more held out" in text for text in texts)


def test_the_exported_model_is_the_trained_one(finished: Trainer, out: Path):
    exported = AutoModelForCausalLM.from_pretrained(out / "model")
    assert isinstance(exported, LoopedForCausalLM)
    for name, tensor in finished.decoder.state_dict().items():
        assert torch.equal(exported.model.state_dict()[name], tensor), name


def test_validation_loss_is_that_of_the_models_own_logits(out: Path):
    """Document by document through the Hugging Face class, whose logits are the mixed distribution."""
    model = tah2.load(out / "model")
    validation = load_procedural(config(out).procedural).validation
    total, count, depths, tokens = 0.0, 0, 0, 0
    for number in range(len(validation)):
        sample = validation.sample(number)
        ids = torch.from_numpy(sample.ids).long()
        with torch.no_grad():
            output = model(ids[None])
        logprob = output.logits[0].log_softmax(-1)
        for t in range(1, len(ids)):
            if sample.mask[t]:
                total, count = total - float(logprob[t - 1, ids[t]]), count + 1
        depths, tokens = depths + int(output.depths.sum()), tokens + len(ids)
    found = json.loads((out / "summary.json").read_text())["validation"]
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["depth/mean"] == pytest.approx(depths / tokens)


def test_the_same_recipe_again_says_that_it_is_done_and_touches_nothing(out: Path, capfd: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    summary = train(config(out))
    assert summary["status"] == "finished"
    assert "This run is finished" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.parametrize("with_checkpoints_only", [False, True])
def test_another_recipe_in_the_same_folder_is_refused(out: Path, tmp_path: Path, with_checkpoints_only: bool):
    folder = out
    if with_checkpoints_only:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "checkpoints").symlink_to(out / "checkpoints")
    with pytest.raises(ConfigError, match=r"loop\.max_depth was 2, is 3.*another folder"):
        train(config(folder, {"loop": {"max_depth": 3}}))


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_hold_the_results_is_refused_at_once(tmp_path: Path, place: str):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot use .*file.* \(.*\): name another folder as 'out'"):
        train(config(tmp_path / place, {"model": {"path": "nowhere"}}))


def test_how_a_run_is_logged_and_spread_may_change(out: Path, tmp_path: Path):
    free = {
        "logging": {"every": 5},
        "validation": {"every": 0},
        "checkpoint": {"keep": 5},
        "system": {"activation_checkpointing": True},
        "batch": {"tokens_per_micro_batch": 64},
    }
    assert train(config(out, free))["status"] == "finished"


def test_a_tokens_per_parameter_budget_counts_the_backbone_alone(tmp_path: Path):
    changes = {"budget": {"steps": None, "tokens_per_parameter": 0.05}, "procedural": {"samples": 50}}
    trainer = Trainer(config(tmp_path, changes), World())
    d, h, v, f = 16, 8, 284, 24
    layer = d * 2 * h * 2 + 2 * d * h + 3 * d * f + 2 * d + 2 * h
    assert backbone_parameters(trainer.decoder) == v * d * 2 + 2 * layer + d
    tokens = len(trainer.data.store.ids) / 50 * 4
    assert trainer.steps == -(-0.05 * backbone_parameters(trainer.decoder) // tokens)


def test_recomputed_activations_and_compiled_blocks_give_the_same_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer_module, "compile_blocks", lambda decoder: compile_blocks(decoder, backend="eager"))
    short = {"model": {"shape": {"num_hidden_layers": 1}}, "budget": {"steps": 2}}
    train(config(tmp_path / "plain", short))
    train(config(tmp_path / "compiled", short, {"system": {"compile": True, "activation_checkpointing": True}}))
    same_curves(curve(tmp_path / "compiled"), curve(tmp_path / "plain"), rel=1e-5)


def test_bf16_on_a_cpu_is_warned_of_and_stays_close_to_fp32(out: Path, tmp_path: Path):
    train(config(tmp_path, {"system": {"precision": "bf16"}, "budget": {"steps": 2}}))
    warnings = [record["text"] for record in records(tmp_path, "message") if record["level"] == "warning"]
    assert any("system.precision=fp32" in text for text in warnings)
    for ours, theirs in zip(records(tmp_path, "step"), records(out, "step"), strict=False):
        for name in ("loss", "optim/grad_norm"):
            assert 0 < abs(ours[name] / theirs[name] - 1) < 0.02, name


def test_a_bf16_run_goes_on_exactly_and_may_go_on_from_an_fp32_one(tmp_path: Path):
    """Checkpoints hold fp32 weights, whatever the computation ran in."""
    whole, bf16, fp32 = {"budget": {"steps": 3}}, {"system": {"precision": "bf16"}}, {"system": {"precision": "fp32"}}
    train(config(tmp_path / "whole", whole, bf16))
    for first in (bf16, fp32):
        out = tmp_path / first["system"]["precision"]
        assert run_one_step(config(out, whole, first))["status"] == "interrupted"
        train(config(out, whole, bf16))
    assert curve(tmp_path / "bf16") == curve(tmp_path / "whole")
    same_curves(curve(tmp_path / "fp32"), curve(tmp_path / "whole"), rel=0.1)
    assert records(tmp_path / "fp32", "start")[-1]["step"] == 1


def test_a_collapsed_decider_is_told_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_module, "JUDGED_STEPS", 3)
    train(config(tmp_path, {"loop": {"exit_threshold": 1.5}, "budget": {"steps": 6}}))
    warnings = [record["text"] for record in records(tmp_path, "message") if record["level"] == "warning"]
    assert any(text.startswith("The decider stops every token after depth 1") for text in warnings)


GATE_ALONE: dict[str, dict[str, Any]] = {
    "exit gate": {"loop": {"kind": "ouro-adaptive"}},
    "decider only": {"loop": {"output": "last"}, "objective": {"scheme": "decider-only"}},
}


@pytest.mark.parametrize("name", GATE_ALONE)
def test_schemes_for_the_gate_alone_leave_the_backbone_bit_identical(name: str, tmp_path: Path):
    trainer = Trainer(config(tmp_path, GATE_ALONE[name], {"budget": {"steps": 3}, "validation": {"every": 0}}), World())
    before = weights(trainer.decoder)
    trainer.run()
    changed = {key for key, tensor in trainer.decoder.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed
    assert all(key.startswith("gate.") for key in changed)
    step = records(tmp_path, "step")[-1]
    assert step["loss"] == step["loss/decider"] != step["loss/prediction"] > 1
    assert "compute/lookahead_tokens_actual" not in step
    assert step["compute/flops"] == step["compute/flops_paper"]


def test_a_gate_rate_without_a_gate_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="gate_learning_rate"):
        train(config(tmp_path, {"loop": {"kind": "standard"}}))


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"token id 2[0-9][0-9], but the model's vocabulary ends at 99"):
        train(config(tmp_path, {"model": {"shape": {"vocab_size": 100}}}, PLAIN))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"logging": {"every": 0}}, "logging.every"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
        ({"validation": {"samples": 0}}, "validation.samples"),
        ({"system": {"threads": 0}}, "threads"),
        ({"optimizer": {"max_gradient_norm": 0}}, "max_gradient_norm"),
        ({"objective": {"tag_weights": {"hop": 1.0}}}, "tag_weights"),
        ({"model": {"start": {"text": "some.txt"}}}, "model.start.text"),
        ({"data": {"sources": [{"path": "x.jsonl"}]}}, "either 'data'"),
        ({"adapter": {"rank": 2}}, "model.path"),
        ({"optimizer": {"learning_rat": 1.0}}, "did you mean 'learning_rate'"),
    ],
)
def test_values_that_make_no_sense_are_named(change: dict[str, Any], sentence: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=sentence):
        config(tmp_path, change)


def test_the_recipe_of_these_tests_uses_several_micro_batches(finished: Trainer):
    assert RECIPE["batch"]["samples"] == 4
    step = next(iter(finished.data.steps(finished.config.batch)))
    assert len(step.micro_batches) > 1


class Watched:
    """A scheme whose outcomes are watched: what of them is still in memory, and when."""

    def __init__(self, scheme: Any) -> None:
        self.scheme, self.outcomes, self.alive = scheme, [], {"before": [], "in backward": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheme, name)

    def __call__(self, *arguments: Any) -> Any:
        self.alive["before"].append(sum(earlier() is not None for earlier in self.outcomes))
        outcome = self.scheme(*arguments)
        keys = [weakref.ref(key) for key in outcome.run.store.looped.keys[-1]]
        self.outcomes.append(weakref.ref(outcome))

        def begins(gradient: torch.Tensor) -> None:
            self.alive["in backward"].append(sum(key() is not None for key in keys))

        outcome.total.register_hook(begins)
        return outcome


@pytest.mark.parametrize("change", [{}, PLAIN], ids=["tah2", "standard"])
def test_a_micro_batch_is_forgotten_before_the_next_and_recomputed_keys_before_backward(
    tmp_path: Path, change: dict[str, Any]
):
    trainer = Trainer(config(tmp_path, {"system": {"activation_checkpointing": True}}, change), World())
    watched = trainer.scheme = Watched(trainer.scheme)  # type: ignore[assignment]
    step = next(iter(trainer.data.steps(trainer.config.batch)))
    trainer.step(step, trainer.new_window())
    nothing = [0] * len(step.micro_batches)
    assert len(nothing) > 1
    assert watched.alive == {"before": nothing, "in backward": nothing}
