"""The paper's numbers, reproduced from shapes alone."""

from __future__ import annotations

import pytest

from tah2.compute import decode_per_token, parameter_counts, per_call, train_flops
from tah2.compute.published import Row, rows
from tah2.config.backbone import preset
from tah2.config.loop import LoopConfig

QWEN = preset("qwen3-1.7b")
TOLERANCE = {"parameters": 0.0051, "per call": 6e-4, "decode, per token": 0.035, "training": 0.1}
"""Half a unit of the last printed digit, but for what the tables' unprinted inputs leave open."""


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.table}: {row.name}")
def test_every_published_number_is_ours(row: Row):
    assert row.ours == pytest.approx(row.published, abs=TOLERANCE[row.table])


def test_attention_per_visible_key():
    assert per_call(QWEN, LoopConfig("tah2")).attention_per_key == 4 * 28 * 2048


def test_the_query_width_is_heads_times_head_dim():
    """Qwen3-4B: 32 heads of 128 on a hidden width of 2560."""
    price = per_call(preset("qwen3-4b"), LoopConfig("standard"))
    assert price.backbone == 36 * (4 * 2560 * (4096 + 1024) + 6 * 2560 * 9728)
    assert price.attention_per_key == 4 * 36 * 4096


def test_decoding_at_the_papers_depth_profile_is_1_22_times_standard():
    standard = decode_per_token(QWEN, LoopConfig("standard"), [], 15_691).total
    tah2 = decode_per_token(QWEN, LoopConfig("tah2"), [0.1925], 15_691).total
    assert standard / 1e9 == pytest.approx(7.04, abs=0.005)
    assert tah2 / 1e9 == pytest.approx(8.59, abs=0.005)
    assert tah2 / standard == pytest.approx(1.22, abs=0.005)


def test_lookahead_on_stopped_tokens_alone_brings_training_below_1_71_times_standard():
    standard = train_flops(QWEN, LoopConfig("standard"), [], 3406, 3.3e9).total_paper
    tah2 = train_flops(QWEN, LoopConfig("tah2"), [0.449], 3406, 3.3e9)
    assert tah2.forward_backward / 1e18 == pytest.approx(62.8, abs=0.05)
    assert tah2.label_paper / 1e18 == pytest.approx(15.2, abs=0.05)
    assert tah2.total_paper / standard == pytest.approx(1.87, abs=0.005)
    assert tah2.total_actual / standard <= 1.71
    assert tah2.label_actual / tah2.label_paper == pytest.approx(1 - 0.449)


def test_huginn_runs_as_many_layers_as_ouro_at_matched_depth():
    huginn, ouro = per_call(QWEN, LoopConfig("huginn")), per_call(QWEN, LoopConfig("ouro"))
    assert (huginn.prelude, huginn.looped, huginn.coda) == (7, 14, 7)
    assert huginn.looped_share == 0.5
    assert huginn.prelude + 3 * huginn.looped + huginn.coda == 2 * ouro.looped


@pytest.mark.parametrize(
    ("loop", "added", "share"),
    [
        ("standard", {}, 0.0),
        ("tah2-fixed", {"updater": 21.0}, 1.2),
        ("ouro", {}, 0.0),
        ("ouro-adaptive", {"exit-gate": 0.002}, 0.0),
        ("huginn", {"input-adapter": 4.2}, 0.24),
    ],
)
def test_the_architecture_summary(loop: str, added: dict[str, float], share: float):
    counts = parameter_counts(QWEN, LoopConfig(loop))
    assert {name: count / 1e6 for name, count in counts.added.items()} == pytest.approx(added, abs=0.05)
    assert 100 * counts.fraction == pytest.approx(share, abs=0.05)
