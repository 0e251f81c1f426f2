"""Decoding FLOPs: closed sums, token by token, and as an enumeration of every pass and every key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tah2.compute import DecodeMeter, decode_flops, decode_per_token, per_call
from tah2.config.backbone import BackboneConfig, preset
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.gate import ExitGate
from tah2.model.kinds import LOOP_KINDS, LoopKind, Output, kind_of
from tah2.model.reentry import InputAdapter
from tah2.visibility import Entries, Rule, dense_mask

TINY = BackboneConfig("qwen3", 11, 8, 10, 5, 3, 1, 4)
"""Query width 12 differs from the hidden width 8; a middle block of 3 layers between one and one."""


@dataclass(frozen=True)
class Expected:
    """What a reader of the paper would write down by hand for one loop."""

    head_every_depth: bool
    adapter_at_depth_one: bool = False


LOOPS: dict[str, tuple[dict[str, Any], Expected]] = {
    "standard": ({"kind": "standard"}, Expected(head_every_depth=False)),
    "tah2": ({"kind": "tah2"}, Expected(head_every_depth=True)),
    "tah2, narrow": ({"kind": "tah2", "updater_width": 3, "decider_top_k": 2}, Expected(head_every_depth=True)),
    "tah2, last output": ({"kind": "tah2", "output": "last"}, Expected(head_every_depth=True)),
    "tah2-fixed": ({"kind": "tah2-fixed"}, Expected(head_every_depth=True)),
    "tah2-fixed, last": ({"kind": "tah2-fixed", "output": "last"}, Expected(head_every_depth=False)),
    "ouro": ({"kind": "ouro"}, Expected(head_every_depth=False)),
    "ouro, top-k": ({"kind": "ouro", "reentry": "top-k-embedding"}, Expected(head_every_depth=True)),
    "ouro-adaptive": ({"kind": "ouro-adaptive"}, Expected(head_every_depth=False)),
    "huginn": ({"kind": "huginn"}, Expected(head_every_depth=False, adapter_at_depth_one=True)),
}


def linear_flops(module: nn.Module | None) -> int:
    if module is None:
        return 0
    return sum(2 * part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear))


def enumerated(loop: LoopConfig, prompt: list[int], decoded: list[int], expected: Expected) -> int:
    """Every linear map of every pass and every visible key, one by one."""
    b, kind = TINY, kind_of(loop)
    ceiling = kind.ceiling(loop)
    d, q, kv, inner = b.hidden_size, b.query_width, b.kv_width, b.intermediate_size
    layer = sum(2 * x * y for x, y in [(d, q), (d, kv), (d, kv), (q, d), (d, inner), (d, inner), (inner, d)])
    with torch.device("meta"):
        reentry = linear_flops(kind.reentry(b, loop))
        gate = linear_flops(None if kind.gate is None else kind.gate(b, loop))
    looped = len(kind.looped_layers(loop, b))
    executed = [*prompt, *decoded]
    passes = [(t, m, last) for t, last in enumerate(executed) for m in range(1, last + 1)]
    if not passes:
        return 0
    position, depth, last = torch.tensor(passes).T
    entries = Entries.of(torch.zeros_like(position), position, depth, last)
    seen = dense_mask(kind.rule, entries, entries).sum(1).tolist()
    total = 0
    for (t, m, final), keys in zip(passes, seen, strict=True):
        if t < len(prompt):
            continue
        total += looped * (layer + 4 * q * keys)
        if m == 1:
            total += (b.num_layers - looped) * (layer + 4 * q * (t + 1))
        if m > 1 or expected.adapter_at_depth_one:
            total += reentry
        if m < ceiling:
            total += gate
        if m == final or expected.head_every_depth:
            total += 2 * d * b.vocab_size
    return total


@st.composite
def responses(draw: st.DrawFn) -> tuple[str, int, list[int], list[int]]:
    name = draw(st.sampled_from(sorted(LOOPS)))
    ceiling = 1 if name == "standard" else draw(st.integers(1, 4))
    depths = st.lists(st.integers(1, ceiling), max_size=7)
    return name, ceiling, draw(depths), draw(depths)


@given(responses())
@settings(deadline=None, max_examples=150)
def test_the_sum_is_the_meter_is_the_enumeration(response: tuple[str, int, list[int], list[int]]):
    name, ceiling, prompt, decoded = response
    options, expected = LOOPS[name]
    loop = LoopConfig(**options, max_depth=ceiling)
    flops = decode_flops(TINY, loop, prompt, decoded)
    assert isinstance(flops, int)
    assert flops == enumerated(loop, prompt, decoded, expected)
    meter = DecodeMeter(TINY, loop, prompt)
    assert sum(meter.token(depth) for depth in decoded) == flops == meter.total


def test_every_kind_is_enumerated():
    assert {options["kind"] for options, _ in LOOPS.values()} >= set(LOOP_KINDS)


def test_a_newly_registered_kind_is_accounted_for(monkeypatch: pytest.MonkeyPatch):
    recent = Rule("recent", "", lambda j, m, last: (j < m) | (j == last), lambda j, m: (j >= m - 1) & (j <= m))
    row = LoopKind("new", "", recent, InputAdapter, ExitGate, Output.LAST, loops_middle=True)
    monkeypatch.setitem(LOOP_KINDS, "new", row)
    loop, prompt, decoded = LoopConfig("new", 3, prelude_layers=0, coda_layers=2), [1, 3, 2], [3, 1, 2, 3]
    expected = Expected(head_every_depth=False, adapter_at_depth_one=True)
    assert decode_flops(TINY, loop, prompt, decoded) == enumerated(loop, prompt, decoded, expected)


def test_a_call_under_another_ceiling_counts_that_ceilings_decider_calls():
    loop, depths = LoopConfig("tah2", max_depth=2), [2, 1, 2]
    raised = decode_flops(TINY, loop, [], depths, max_depth=3)
    assert raised == decode_flops(TINY, replace(loop, max_depth=3), [], depths)
    decider = per_call(TINY, loop).gate
    assert raised - decode_flops(TINY, loop, [], depths) == 2 * decider, "two tokens of depth 2 are asked once more"


QWEN = preset("qwen3-1.7b")
BB, HEAD, KEY, UPDATER, DECIDER = 2_818_572_288, 622_329_856, 229_376, 41_943_040, 50_335_744
P, N = 5, 7


@pytest.mark.parametrize(
    ("kind", "ceiling", "per_token"),
    [
        ("standard", 1, lambda t, m: BB + HEAD + KEY * (P + t)),
        ("tah2-fixed", 3, lambda t, m: m * (BB + HEAD) + 2 * UPDATER + KEY * sum(P + t - 1 + k for k in (1, 2, 3))),
        ("ouro", 4, lambda t, m: m * BB + HEAD + KEY * m * (P + t)),
        ("ouro-adaptive", 2, lambda t, m: m * BB + HEAD + KEY * m * (P + t) + 2 * 2048),
        ("huginn", 3, lambda t, m: (14 + 14 * m) * (BB + KEY * (P + t)) // 28 + HEAD + 2 * m * 2048**2),
    ],
)
def test_the_papers_closed_forms_at_full_depth(kind: str, ceiling: int, per_token: Any):
    flops = decode_flops(QWEN, LoopConfig(kind, ceiling), [ceiling] * P, [ceiling] * N)
    assert flops == sum(per_token(t, ceiling) for t in range(1, N + 1))


def test_the_papers_expanded_form_for_recorded_depths():
    ceiling, prompt, decoded = 3, [2, 1, 3], [1, 3, 2, 2, 1]
    total = 0
    for t, depth in enumerate(decoded, start=1):
        earlier = prompt + decoded[: t - 1]
        keys = sum(sum(min(r, m) for r in earlier) + m for m in range(1, depth + 1))
        total += depth * (BB + HEAD) + KEY * keys + (depth - 1) * UPDATER + min(depth, ceiling - 1) * DECIDER
    assert decode_flops(QWEN, LoopConfig("tah2", ceiling), prompt, decoded) == total


@pytest.mark.parametrize("kind", ["standard", "tah2-fixed", "ouro", "huginn"])
def test_the_mean_form_is_exact_where_every_token_runs_to_the_ceiling(kind: str):
    loop = LoopConfig(kind, 3)
    depth = kind_of(loop).ceiling(loop)
    exact = decode_flops(TINY, loop, [depth] * P, [depth] * N)
    assert decode_per_token(TINY, loop, [], P + (N + 1) / 2).total * N == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("kind", ["tah2", "ouro-adaptive"])
def test_the_mean_form_is_the_expectation_of_evenly_spread_depths(kind: str):
    loop = LoopConfig(kind, 3)
    chances = torch.tensor([0.5, 0.3, 0.2])
    depths = (
        torch.multinomial(chances, 6000, replacement=True, generator=torch.Generator().manual_seed(0)) + 1
    ).tolist()
    exact = decode_flops(TINY, loop, depths[:3000], depths[3000:]) / 3000
    assert decode_per_token(TINY, loop, [0.5, 0.2], 4500.5).total == pytest.approx(exact, rel=0.02)


def test_a_response_without_decoded_positions_costs_nothing():
    assert decode_flops(TINY, LoopConfig("tah2"), [2, 1], []) == 0
    assert decode_flops(TINY, LoopConfig("tah2"), [], []) == 0


def test_a_depth_outside_the_ceiling_is_refused():
    with pytest.raises(ValueError, match="ceiling 2"):
        decode_flops(TINY, LoopConfig("tah2"), [1], [3])
    with pytest.raises(ValueError, match="ceiling 2"):
        DecodeMeter(TINY, LoopConfig("tah2"), [0])
    meter = DecodeMeter(TINY, LoopConfig("tah2"))
    with pytest.raises(ValueError, match="ceiling 2"):
        meter.token(3)
    assert meter.total == 0


@pytest.mark.parametrize(
    ("kind", "fractions", "keys", "message"),
    [
        ("tah2", [], 10, "needs 2 continue fractions"),
        ("tah2", [0.2, 0.3], 10, "of all tokens"),
        ("tah2", [1.2, 0.3], 10, "of all tokens"),
        ("ouro", [0.5], 10, "leave the continue fractions out"),
        ("tah2", [0.5, 0.1], 0, "at least 1"),
    ],
)
def test_impossible_plans_are_refused(kind: str, fractions: list[float], keys: float, message: str):
    with pytest.raises(ConfigError, match=message):
        decode_per_token(TINY, LoopConfig(kind, 3), fractions, keys)
