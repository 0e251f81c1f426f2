"""The start of a learned updater: fitted to what the backbone predicts, and nothing else touched."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tah2.config.strict import ConfigError
from tah2.model.loop import LoopSettings, Thresholded, Tokens
from tah2.model.scoring import score
from tah2.model.start import (
    StartConfig,
    calibration_text,
    calibration_tokens,
    fit_updater,
    regression_data,
    running_in_fp32,
    start_updater,
)
from tests.model.tiny import random_tokens, tiny_loop, tiny_model

QUICK = StartConfig(steps=60, batch=64)


def a_model(max_depth: int = 3, **loop: object):
    model = tiny_model(tiny_loop(max_depth, updater_width=24, **loop))
    model.reset_parts()
    return model


@torch.no_grad()
def test_the_target_is_the_expected_next_embedding_at_the_size_of_embeddings():
    model, tokens = a_model(), random_tokens(12, 5)
    anchor, state, target = regression_data(model, tokens)
    scores = score(model, tokens, settings=LoopSettings(max_depth=1))
    table = model.embed_tokens.weight
    expected = scores.logits.softmax(-1) @ table
    torch.testing.assert_close(anchor, table[tokens.ids])
    torch.testing.assert_close(state, scores.run.final_state)
    torch.testing.assert_close(torch.cosine_similarity(target, expected), torch.ones(17))
    torch.testing.assert_close(target.square().mean(-1).sqrt(), table.square().mean().sqrt().expand(17))


def test_the_fit_explains_tokens_that_it_has_not_seen():
    model, tokens = a_model(), random_tokens(*[64] * 12)
    short = fit_updater(copy.deepcopy(model), tokens, StartConfig(steps=1))
    long = fit_updater(model, tokens, StartConfig(steps=300))
    assert long < 0.6 < 0.9 < short
    anchor, state, target = regression_data(model, random_tokens(*[64] * 12, seed=9))
    fitted = model.reentry(anchor, state, None, model.embed_tokens.weight)
    assert (fitted - target).square().mean() < 0.9 * (target - target.mean(0)).square().mean()
    assert 0.5 < fitted.square().mean().sqrt() / target.square().mean().sqrt() < 1.5


def test_the_embedding_start_repeats_the_input():
    model, tokens = a_model(), random_tokens(*[64] * 8)
    unexplained = fit_updater(model, tokens, StartConfig(updater="embedding", steps=300))
    assert unexplained < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_updater_changes(dtype: torch.dtype):
    model, tokens = a_model().to(dtype), random_tokens(40, 40)
    model.reentry.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    fit_updater(model, tokens, QUICK)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == dtype
        assert name.startswith("reentry.") or torch.equal(tensor, before[name])
    assert not torch.equal(model.reentry.fuse.weight, before["reentry.fuse.weight"])
    assert not any(parameter.requires_grad for parameter in model.reentry.parameters())
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "reentry" not in name)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_bf16_model_is_fitted_in_fp32_and_left_in_bf16():
    model, tokens = a_model().bfloat16(), random_tokens(30)
    wide = copy.deepcopy(model).float()
    seen = []
    model.layers[0].mlp.up_proj.register_forward_hook(lambda module, x, out: seen.append(out.dtype))
    for ours, exact in zip(regression_data(model, tokens), regression_data(wide, tokens), strict=True):
        torch.testing.assert_close(ours, exact)
    assert seen == [torch.float32]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_running_in_fp32_ends_cleanly_after_an_error():
    model = a_model().bfloat16()
    with pytest.raises(RuntimeError, match="stop"), running_in_fp32(model):
        raise RuntimeError("stop")
    with torch.no_grad():
        assert score(model, random_tokens(4)).run.final_state.dtype == torch.bfloat16


def test_the_fit_is_a_function_of_its_seed_alone():
    tokens, fitted = random_tokens(40, 40), []
    for seed in (0, 0, 1):
        model = a_model()
        torch.rand(len(fitted) + 1)
        fit_updater(model, tokens, StartConfig(steps=20, batch=16, seed=seed))
        fitted.append(model.reentry.fuse.weight)
    assert torch.equal(fitted[0], fitted[1])
    assert not torch.equal(fitted[0], fitted[2])


@torch.no_grad()
def test_depths_stay_far_closer_to_depth_one_than_from_a_random_start():
    """What the start is for: at every depth up to the ceiling, inputs look like embeddings."""
    model, tokens = a_model(max_depth=4), random_tokens(*[64] * 6)
    scale = float(model.embed_tokens.weight.square().mean().sqrt())
    random_start = copy.deepcopy(model)
    fit_updater(model, tokens, StartConfig(steps=100))

    def input_sizes(which) -> list[float]:
        sizes: list[float] = []
        handle = which.reentry.register_forward_hook(
            lambda module, x, out: sizes.append(float(out.square().mean().sqrt()))
        )
        score(which, random_tokens(50, seed=3), settings=LoopSettings(router=Thresholded(-1.0)))
        handle.remove()
        return sizes

    assert all(abs(size / scale - 1) < 0.5 for size in input_sizes(model))
    assert len(input_sizes(model)) == 3
    assert all(abs(size / scale - 1) > 1 for size in input_sizes(random_start))


@pytest.mark.parametrize("kind", ["standard", "ouro", "huginn"])
def test_kinds_without_a_learned_updater_need_no_fit(kind: str):
    model = tiny_model(tiny_loop(kind=kind))
    before = copy.deepcopy(model.state_dict())
    assert start_updater(model, QUICK, None) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_random_start_is_left_random():
    model = a_model()
    before = model.reentry.fuse.weight.clone()
    assert start_updater(model, StartConfig(updater="random"), None) is None
    assert torch.equal(model.reentry.fuse.weight, before)


def test_text_is_read_with_the_tokenizer(base: Path, tmp_path: Path):
    model = a_model()
    (tmp_path / "text.txt").write_text("the river runs to the sea " * 100)
    tokens = calibration_tokens(model, StartConfig(text=tmp_path / "text.txt"), base)
    assert len(tokens) == 600
    assert tokens.document.unique().tolist() == [0, 1, 2]
    assert tokens.ids[:6].tolist() == [4, 6, 7, 8, 4, 9]
    assert len(calibration_text(None)) > 3000


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "Cannot read"), (b"\xff\xfe\xff", "not UTF-8"), (b"", "too short")]
)
def test_text_that_cannot_be_used_is_refused(content: bytes | None, sentence: str, base: Path, tmp_path: Path):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        calibration_tokens(a_model(), StartConfig(text=path), base)


def test_text_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokenizer"):
        calibration_tokens(a_model(), StartConfig(text=tmp_path / "text.txt"), tmp_path)


def test_a_few_tokens_are_enough_to_run():
    assert fit_updater(a_model(), Tokens.pack([torch.tensor([3])]), StartConfig(steps=1)) >= 0


@pytest.mark.parametrize("mistake", [{"steps": 0}, {"batch": 0}])
def test_a_fit_of_nothing_is_refused(mistake: dict[str, int]):
    with pytest.raises(ConfigError, match="at least one step"):
        StartConfig(**mistake)
