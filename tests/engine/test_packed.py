"""Packed weights and compiled kernels behind the engine's seam: the same tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tah2.config.strict import ConfigError
from tah2.engine import kernels
from tah2.engine.config import EngineConfig
from tah2.engine.packed import PackedWeights, packed_part
from tah2.engine.params import SamplingParams
from tah2.engine.weights import ModelWeights, choose_weights
from tah2.model.gate import Decider
from tah2.model.reentry import Predicted
from tests.engine.tiny import KINDS, Ask, drained, engine, model, run, same

ASKS = {
    "a": Ask((3, 1, 4, 1, 5, 9, 2, 6), SamplingParams(temperature=0.0, max_tokens=8)),
    "b": Ask((7,), SamplingParams(temperature=0.9, seed=2, max_tokens=8)),
    "c": Ask(tuple(range(20)), SamplingParams(temperature=0.9, seed=3, max_tokens=5)),
}


@pytest.mark.skipif(not kernels.available(), reason="no compiler here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wavefront_rows", [0, 99])
def test_compiled_kernels_give_the_references_tokens(kind: str, wavefront_rows: int):
    made = engine(kind, kernels="auto", wavefront_rows=wavefront_rows, max_batch_tokens=7)
    assert isinstance(made.runner.weights, PackedWeights)
    outputs = run(made, ASKS, {"b": 2, "c": 4})
    for name, ask in ASKS.items():
        same(kind, ask, outputs[name])
    drained(made)


@pytest.mark.parametrize("kind", ["tah2-4", "huginn"])
def test_packed_weights_without_kernels_give_the_references_tokens(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels.build, "functions", lambda: None)
    made = engine(kind, max_batch_tokens=7)
    made.runner.weights = PackedWeights(model(kind))
    outputs = run(made, ASKS)
    for name, ask in ASKS.items():
        same(kind, ask, outputs[name])


def test_the_fitting_weights_are_chosen():
    decoder = model("tah2-2")
    assert isinstance(choose_weights(decoder, EngineConfig(kernels="off")), ModelWeights)
    assert not isinstance(choose_weights(decoder, EngineConfig(kernels="off")), PackedWeights)
    stored = choose_weights(decoder, EngineConfig(kernels="off", weight_storage="bf16"))
    assert isinstance(stored, PackedWeights)
    elsewhere = copy.deepcopy(decoder).to("meta")
    assert not isinstance(choose_weights(elsewhere, EngineConfig()), PackedWeights)
    with pytest.raises(ConfigError, match="weight_storage is for models on a CPU"):
        choose_weights(elsewhere, EngineConfig(weight_storage="int8"))
    state = torch.randn(3, 16)
    torch.testing.assert_close(stored.head(state), ModelWeights(decoder).head(state), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("storage", kernels.STORAGES)
@pytest.mark.parametrize("name", ["tah2-2", "ouro-adaptive", "top-k-embedding", "huginn"])
def test_packed_parts_equal_the_models(way: str, name: str, storage: kernels.Storage):
    decoder = model(name)
    plain, packed = ModelWeights(decoder), PackedWeights(decoder, storage)
    anchor, state, probabilities = torch.randn(3, 5, 16).unbind()
    predicted = Predicted(torch.randint(48, (5, 16)), probabilities.softmax(-1))
    bound = {"fp32": 1e-5, "bf16": 0.05, "int8": 0.1}[storage]
    with torch.inference_mode():
        if decoder.gate is not None:
            says, expected = (each.gate(anchor, state, predicted.probabilities) for each in (packed, plain))
            assert says.shape == (5,)
            torch.testing.assert_close(says, expected, atol=bound * float(expected.abs().max()), rtol=0)
        again, expected = (each.reenter(anchor, state, predicted) for each in (packed, plain))
        torch.testing.assert_close(again, expected, atol=bound * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_part_in_one_call_equals_its_stepwise_twin(compiled: None, rows: int):
    decoder = model("tah2-2")
    for packed in (packed_part(decoder.gate, "fp32").packed, packed_part(decoder.reentry, "fp32").packed):
        inputs = [torch.randn(rows, 2 * norm.numel())[:, : norm.numel()] for norm in packed.input_norms]
        assert packed.native is not None
        made = packed(*inputs)
        torch.testing.assert_close(made, packed.stepwise(*inputs), atol=2e-6, rtol=2e-6)
        assert torch.equal(packed(*(x[:1] for x in inputs)), made[:1])
        with pytest.raises(ValueError, match="inputs of widths"):
            packed(*inputs[:-1], inputs[-1][:, 1:])


def test_a_decider_inside_another_gate_is_packed_too(compiled: None):
    decoder = model("tah2-2")
    assert decoder.gate is not None
    outer = nn.Sequential(decoder.gate)
    packed = packed_part(outer, "fp32")
    assert type(packed[0]) is not Decider
    assert type(outer[0]) is Decider


@pytest.mark.skipif(not kernels.available(), reason="no compiler here")
@pytest.mark.parametrize("shape", [(3, 64), (1, 5), (2, 4, 24)])
def test_norms_equal_stock_pytorchs(shape: tuple[int, ...]):
    weight = torch.randn(shape[-1])
    for x in (torch.randn(shape), torch.randn(shape[-1], 3).T):
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), kernels.reference_rms_norm(x, weight, 1e-6))
