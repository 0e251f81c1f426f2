"""The learned parts are the paper's formulas, have its sizes, and begin where they should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tah2.config.backbone import preset
from tah2.config.loop import LoopConfig
from tah2.model.gate import Decider, ExitGate
from tah2.model.loop import LoopedDecoder
from tah2.model.parts import RMSNorm
from tah2.model.reentry import InputAdapter, Predicted, TopKEmbedding, Updater
from tests.model.tiny import TINY, tiny_loop, tiny_model

D = TINY.hidden_size


def norm(x: Tensor, part: RMSNorm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + part.eps).sqrt() * part.weight


def swiglu(x: Tensor, part) -> Tensor:
    gate, up, down = part.gate_proj.weight, part.up_proj.weight, part.down_proj.weight
    return down @ (torch.sigmoid(gate @ x) * (gate @ x) * (up @ x))


def part_of(model_kind: str, name: str):
    return getattr(tiny_model(tiny_loop(kind=model_kind)), name)


@torch.no_grad()
def test_the_updater_is_rn_b_rn_w_of_both_norms():
    part: Updater = part_of("tah2", "reentry")
    e, h = torch.randn(2, D)
    x = part.fuse.weight @ torch.cat([norm(e, part.embedding_norm), norm(h, part.state_norm)])
    expected = norm(swiglu(norm(x, part.fused_norm), part.mlp), part.output_norm)
    torch.testing.assert_close(part(e[None], h[None], None, torch.empty(0))[0], expected)
    assert torch.equal(part.first(e), e)


@torch.no_grad()
def test_the_decider_scores_embedding_state_and_largest_probabilities():
    part: Decider = part_of("tah2", "gate")
    e, h = torch.randn(2, D)
    q = torch.rand(9).softmax(0).sort(descending=True).values
    evidence = [norm(e, part.embedding_norm), norm(h, part.state_norm), norm(q[:4], part.probability_norm)]
    x = part.fuse.weight @ torch.cat(evidence)
    expected = part.score.weight @ norm(swiglu(x, part.mlp), part.output_norm)
    torch.testing.assert_close(part(e[None], h[None], q[None]), expected)


@torch.no_grad()
def test_the_exit_gate_is_a_linear_map_whose_sigmoid_is_the_exit_probability():
    part: ExitGate = part_of("ouro-adaptive", "gate")
    h = torch.randn(3, D)
    exit_probability = torch.sigmoid(h @ part.exit.weight[0])
    torch.testing.assert_close(part(h, h, None).sigmoid(), 1 - exit_probability)


def test_q_exit_stops_at_the_first_depth_whose_cumulative_exit_probability_reaches_q():
    survival, g, q = torch.tensor([1.0, 1.0, 0.6]), torch.tensor([0.51, 0.5, 0.5]), 0.5
    assert ExitGate.continues(g, survival, 1 - q).tolist() == [True, False, False]
    assert Decider.continues(g, survival, 0.5).tolist() == [True, True, True]


@torch.no_grad()
def test_the_input_adapter_retains_and_injects():
    part: InputAdapter = part_of("huginn", "reentry")
    z, r = torch.randn(2, D)
    v = torch.log1p(part.inject_bias.exp())
    a = torch.exp(-v * part.retain_bias.exp())
    torch.testing.assert_close(part(z[None], r[None], None, torch.empty(0))[0], a * r + v * (part.inject.weight @ z))
    part.reset()
    torch.testing.assert_close(part.first(z), z)


def test_the_top_k_embedding_weighs_token_embeddings_by_their_probabilities():
    part = TopKEmbedding(TINY, tiny_loop(embedding_top_k=3))
    table = torch.randn(TINY.vocab_size, D, requires_grad=True)
    probabilities, tokens = torch.rand(5, TINY.vocab_size).softmax(-1).topk(7)
    out = part(torch.empty(5, D), torch.empty(5, D), Predicted(tokens, probabilities), table)
    for row, ids, weights in zip(out, tokens[:, :3], probabilities[:, :3], strict=True):
        torch.testing.assert_close(row, sum(w * table[i] for i, w in zip(ids, weights, strict=True)) / weights.sum())
    (gradient,) = torch.autograd.grad(out.sum(), table)
    assert gradient[tokens[0, 0]].any()


@torch.no_grad()
def test_the_start_state_is_undecided_and_leaves_depth_one_alone():
    model = tiny_model()
    model.reset_parts()
    e, h, q = torch.randn(4, D), torch.randn(4, D), torch.rand(4, 9)
    assert torch.equal(model.gate(e, h, q).sigmoid(), torch.full((4,), 0.5))
    assert model.gate.mlp.up_proj.weight.std() > 0


TABLE = {
    # scale: backbone, updater, decider, added fraction (%), as the paper prints them
    "qwen3-1.7b": ("1720.57M", "20.98M", "25.18M", "2.61"),
    "qwen3-4b": ("4022.47M", "32.78M", "39.33M", "1.76"),
    "qwen3-8b": ("8190.74M", "83.90M", "100.68M", "2.20"),
}


def on_meta(scale: str, kind: str) -> LoopedDecoder:
    with torch.device("meta"):
        return LoopedDecoder(preset(scale), LoopConfig(kind))


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def millions(count: int) -> str:
    return f"{count / 1e6:.2f}M"


@pytest.mark.parametrize("scale", TABLE)
def test_whole_models_have_the_published_sizes(scale: str):
    model = on_meta(scale, "tah2")
    added = size(model.reentry) + size(model.gate)
    backbone, updater, decider, percent = TABLE[scale]
    assert millions(size(model) - added) == backbone
    assert (millions(size(model.reentry)), millions(size(model.gate))) == (updater, decider)
    assert f"{100 * added / size(model):.2f}" == percent


def test_the_baselines_add_what_the_paper_says():
    huginn = on_meta("qwen3-1.7b", "huginn")
    assert millions(size(huginn.reentry)) == "4.20M"
    assert huginn.looped == range(7, 21)
    assert size(on_meta("qwen3-1.7b", "ouro-adaptive").gate) == 2048
    assert size(on_meta("qwen3-1.7b", "ouro").reentry) == 0
