"""The lm-evaluation-harness sees what transformers sees for Standard, and the mixture for the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lm_eval.api.instance import Instance
from transformers import Qwen3Config, Qwen3ForCausalLM

from tah2 import LLM, SamplingParams
from tah2.cli.frame import main
from tah2.config.strict import ConfigError
from tah2.evals.lm_eval import LoopedLM
from tah2.model.checkpoint import convert
from tests.engine.tiny import byte_tokenizer
from tests.evals.toy import BACKBONE, save_model

PAIRS = [
    ("Loops are", " deep"),
    ("a", "b"),
    ("", "no context at all"),
    ("trailing space ", "moves over"),
    ("x" * 90, "a continuation that takes up most of the room there is"),
    ("naïve", " ünïcode"),
]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random transformers model that writes bytes."""
    torch.manual_seed(3)
    settings = {name: value for name, value in BACKBONE.items() if name != "model_type"}
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, "max_position_embeddings": 96, "initializer_range": 0.5}))
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(base: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(base), device="cpu", dtype="float32", batch_size=2)


@pytest.fixture(scope="module")
def ours(base: Path, tmp_path_factory: pytest.TempPathFactory) -> LoopedLM:
    folder = convert(base, tmp_path_factory.mktemp("standard"), loop="standard", max_depth=1)
    return LoopedLM(str(folder), device="cpu", kernels="off", kv_slots=4000, pack_tokens=150)


def test_standard_scores_what_transformers_scores(ours: LoopedLM, theirs: Any):
    asked = instances("loglikelihood", PAIRS)
    mine, its = ours.loglikelihood(asked, disable_tqdm=True), theirs.loglikelihood(asked, disable_tqdm=True)
    for (value, greedy), (expected, expected_greedy) in zip(mine, its, strict=True):
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == expected_greedy


def test_standard_scores_whole_texts_as_transformers_does(ours: LoopedLM, theirs: Any):
    texts = [("short",), ("a text that is longer than the model's window " * 5,)]
    asked = instances("loglikelihood_rolling", texts)
    mine = ours.loglikelihood_rolling(asked, disable_tqdm=True)
    assert mine == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), abs=1e-3)


def test_standard_writes_what_transformers_writes(ours: LoopedLM, theirs: Any):
    until = {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False}
    asked = instances("generate_until", [("Once upon", until), ("y" * 120, until), ("z", {**until, "max_gen_toks": 3})])
    assert ours.generate_until(asked, disable_tqdm=True) == theirs.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize("kind", ["tah2", "tah2-fixed", "ouro", "ouro-adaptive", "huginn"])
def test_scores_are_the_engines_log_probabilities(tmp_path: Path, kind: str):
    """What the engine reports for a continuation that it wrote itself, token by token."""
    folder = save_model(tmp_path, kind=kind, max_depth=3, exit_threshold=0.25)
    lm = LoopedLM(str(folder), device="cpu", kernels="off", kv_slots=4000)
    llm: LLM = lm.llm
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=4, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = [byte_tokenizer().encode("a prompt"), byte_tokenizer().encode("another, longer one")]
    outputs = llm.generate(prompts, params)
    asked = [(None, prompt, output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    found = lm._loglikelihood_tokens(asked, disable_tqdm=True)
    for (value, greedy), output in zip(found, outputs, strict=True):
        assert value == pytest.approx(output.outputs[0].cumulative_logprob, abs=1e-3)
        assert greedy == all(min(each.values(), key=lambda token: token.rank or 0).rank == 1
                             for each in output.outputs[0].logprobs or [])  # fmt: skip


def test_a_call_may_run_under_another_ceiling(tmp_path: Path):
    folder = save_model(tmp_path)
    values = [
        LoopedLM(str(folder), device="cpu", kernels="off", kv_slots=4000, max_depth=depth).loglikelihood(
            instances("loglikelihood", [("some text", " and more")]), disable_tqdm=True
        )[0][0]
        for depth in (1, 3)
    ]
    assert abs(values[0] - values[1]) > 1e-3


def test_repeats_are_different_samples_and_unknown_options_are_refused(tmp_path: Path):
    lm = LoopedLM(str(save_model(tmp_path)), device="cpu", kernels="off", kv_slots=4000)
    sampled = {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.0}
    texts = lm.generate_until(instances("generate_until", [("Q", sampled)] * 3), disable_tqdm=True)
    assert len(set(texts)) == 3
    assert texts == lm.generate_until(instances("generate_until", [("Q", sampled)] * 3), disable_tqdm=True)
    with pytest.raises(ConfigError, match="num_beams"):
        lm.generate_until(instances("generate_until", [("Q", {"until": [], "num_beams": 4})]), disable_tqdm=True)
    assert not lm.llm.engine.has_unfinished_requests()


def test_the_harness_finds_the_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = save_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"q": "1+1=", "a": 0}\n{"q": "2+2=", "a": 1}\n', encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(
        f"""
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: ["2", "4"]
doc_to_target: a
metric_list: [{{metric: acc}}]
""",
        encoding="utf-8",
    )
    found = simple_evaluate(
        model="tah2",
        model_args=f"pretrained={folder},kv_slots=4000,kernels=off",
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    accuracy = found["results"]["tiny_choice"]["acc,none"]
    lm = LoopedLM(str(folder), device="cpu", kernels="off", kv_slots=4000)
    asked = instances("loglikelihood", [(q, f" {a}") for q in ("1+1=", "2+2=") for a in "24"])
    values = [value for value, _ in lm.loglikelihood(asked, disable_tqdm=True)]
    assert accuracy == ((values[0] > values[1]) + (values[3] > values[2])) / 2


def test_our_command_line_is_the_harness_own(monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["tah2"])
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(list(sys.argv)))
    assert main(["lm-eval", "run", "--model", "tah2", "--tasks", "hellaswag"]) == 0
    assert seen == [["tah2 lm-eval", "run", "--model", "tah2", "--tasks", "hellaswag"]]


def test_the_harness_flags_yield_to_the_models_arguments(tmp_path: Path):
    folder = save_model(tmp_path)
    flags = {"batch_size": 1, "device": "cuda:0", "max_batch_size": None}
    lm = LoopedLM.create_from_arg_obj({"pretrained": str(folder), "kv_slots": 4000, "batch_size": 3}, flags)
    assert lm.llm.engine.config.max_num_seqs == 3


def test_an_unknown_dtype_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="dtype must be one of"):
        LoopedLM(str(tmp_path), dtype="float8")
