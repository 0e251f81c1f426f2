"""CPU kernels agree with stock PyTorch, with and without a compiler, for every shape, storage and slot list."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tah2.config.backbone import BackboneConfig
from tah2.config.strict import ConfigError
from tah2.engine import kernels
from tah2.engine.kernels import build, memory
from tah2.model.decoder import Block, initialise_backbone

EVERY_STORAGE = pytest.mark.parametrize("storage", kernels.STORAGES)


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def error(result: Tensor, truth: Tensor) -> float:
    """Largest error relative to the largest value."""
    return ((result - truth).abs().max() / truth.abs().max()).item() if truth.numel() else 0.0


# Linear layers


@EVERY_STORAGE
@pytest.mark.parametrize(("outputs", "inner"), [(1, 1), (16, 8), (17, 5), (31, 33), (100, 129), (64, 576)])
def test_a_packed_layer_equals_its_plain_twin(way: str, storage: kernels.Storage, outputs: int, inner: int):
    weight, bias = random(outputs, inner, seed=1), random(outputs, seed=2)
    layer, bare = kernels.pack_linear(weight, bias, storage), kernels.pack_linear(weight, storage=storage)
    for rows in (0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 33, 70, 150):
        x = random(rows, inner, seed=rows)
        twin = kernels.stored(weight, storage)
        assert layer(x).shape == (rows, outputs)
        assert error(layer(x), F.linear(x, twin, bias)) < 1e-5
        assert error(bare(x), F.linear(x, twin)) < 1e-5


def test_every_number_of_rows_up_to_seventy_is_right(way: str):
    weight = random(40, 21)
    layer, x = kernels.pack_linear(weight), random(70, 21, seed=1)
    for rows in range(71):
        assert error(layer(x[:rows]), F.linear(x[:rows], weight)) < 1e-5


@EVERY_STORAGE
def test_a_row_does_not_depend_on_the_others_nor_on_threads(compiled: None, storage: kernels.Storage):
    layer, x = kernels.pack_linear(random(200, 96), random(200), storage), random(67, 96, seed=1)
    before, alone = torch.get_num_threads(), torch.cat([layer(row) for row in x.split(1)])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(layer(x[:rows]), alone[:rows]) for rows in (2, 5, 16, 17, 40, 67))
    finally:
        torch.set_num_threads(before)


def test_inputs_may_be_strided_leading_dimensions_any_and_dtypes_lower(way: str):
    weight = random(20, 12)
    layer = kernels.pack_linear(weight)
    wide = random(6, 30, seed=1)
    for x in (
        wide[:, 3:15],
        wide[::2, :12],
        wide.T[:12].T,
        random(12, 5).T,
        random(2, 3, 12),
        random(12),
        wide[:1, 2:14],
    ):
        assert error(layer(x), F.linear(x, weight)) < 1e-5
    half = random(3, 12).bfloat16()
    assert layer(half).dtype == torch.bfloat16
    assert error(layer(half).float(), F.linear(half.float(), weight)) < 2**-8


def test_several_layers_pack_into_one(way: str):
    parts = [random(n, 10, seed=n) for n in (24, 8, 9)]
    biases = [random(24), None, random(9)]
    x = random(3, 10)
    expected = torch.cat([F.linear(x, w, b) for w, b in zip(parts, biases, strict=True)], dim=-1)
    assert error(kernels.pack_linear(parts, biases)(x), expected) < 1e-5


@EVERY_STORAGE
@pytest.mark.parametrize("outputs", [5, 16, 40])
def test_swiglu_equals_its_two_products(way: str, storage: kernels.Storage, outputs: int):
    gate, up = random(outputs, 24, seed=1), random(outputs, 24, seed=2)
    gate_bias, up_bias = random(outputs, seed=3), random(outputs, seed=4)
    layer = kernels.packed_swiglu(gate, up, gate_bias, up_bias, storage)
    for rows in (1, 2, 9, 20):
        x = 3 * random(rows, 24, seed=rows)
        left = F.silu(F.linear(x, kernels.stored(gate, storage), gate_bias))
        expected = left * F.linear(x, kernels.stored(up, storage), up_bias)
        assert error(layer(x), expected) < 1e-5


def test_a_product_can_be_added_to_what_is_there(way: str):
    weight, x, base = random(19, 11), random(4, 11), random(4, 19, seed=5)
    out = base.clone()
    assert kernels.pack_linear(weight)(x, out).data_ptr() == out.data_ptr()
    assert error(out, base + F.linear(x, weight)) < 1e-5


@pytest.mark.parametrize(("storage", "bound"), [("fp32", 1e-6), ("bf16", 2**-9), ("int8", 0.012)])
def test_reduced_storage_stays_within_its_error(way: str, storage: kernels.Storage, bound: float):
    weight, x = random(256, 384) / 384**0.5, random(8, 384, seed=1)
    exact = F.linear(x.double(), weight.double())
    relative = (kernels.pack_linear(weight, storage=storage)(x) - exact).norm() / exact.norm()
    assert relative < bound
    if storage != "fp32":
        assert relative > bound / 8  # the bound is the storage's, not a formality


def test_int8_takes_a_row_of_zeros():
    assert torch.equal(kernels.pack_linear(torch.zeros(3, 4), storage="int8")(torch.ones(2, 4)), torch.zeros(2, 3))


def test_bad_requests_name_the_remedy():
    with pytest.raises(ConfigError, match="fp32, bf16, int8"):
        kernels.pack_linear(random(4, 4), storage="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes 4 features, not 5"):
        kernels.pack_linear(random(4, 4))(random(1, 5))
    with pytest.raises(ValueError, match="same shape"):
        kernels.packed_swiglu(random(4, 4), random(5, 4))
    with pytest.raises(ValueError, match="contiguous int32"):
        kernels.Visible.of(torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))


# Attention


def pools(slots: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return random(slots, heads, width, seed=1).to(dtype), random(slots, heads, width, seed=2).to(dtype)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, lists: list[list[int]], scale: float) -> Tensor:
    """Softmax attention in double precision, one entry and one head at a time."""
    shared = query.shape[1] // key.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i, seen in enumerate(lists):
        for head in range(query.shape[1]):
            if seen:
                scores = key[seen, head // shared].double() @ query[i, head].double() * scale
                out[i, head] = scores.softmax(0) @ value[seen, head // shared].double()
    return out


def as_lists(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    flat = [slot for one in lists for slot in one]
    ends = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0)
    return torch.tensor(flat, dtype=torch.int32), ends.int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 32), (10, 2, 20), (7, 1, 6), (2, 1, 128)])
def test_paged_attention_equals_the_softmax(way: str, heads: int, kv_heads: int, width: int, dtype: torch.dtype):
    key, value = pools(400, kv_heads, width, dtype)
    order = torch.randperm(400, generator=generator()).tolist()
    lists = [order[:1], [], order[3:67], order[100:165], order[::-1], order[5:8]]
    query = 2 * random(len(lists), heads, width)
    result = kernels.paged_attention(query, key, value, *as_lists(lists), scale=0.3)
    assert error(result.double(), exact_attention(query, key, value, lists, 0.3)) < 1e-5
    assert torch.equal(result[1], torch.zeros(heads, width))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), heads=st.integers(1, 3), shared=st.integers(1, 6), width=st.integers(1, 40))
def test_attention_reads_exactly_the_listed_slots(data: st.DataObject, heads: int, shared: int, width: int):
    slot = st.integers(0, 59)
    lists = data.draw(st.lists(st.lists(slot, max_size=90), min_size=1, max_size=5))
    key, value = pools(60, heads, width)
    unseen = torch.ones(60, dtype=torch.bool)
    unseen[[s for one in lists for s in one]] = False
    key[unseen], value[unseen] = float("nan"), float("nan")
    query = random(len(lists), heads * shared, width)
    result = kernels.paged_attention(query, key, value, *as_lists(lists), scale=width**-0.5)
    expected = exact_attention(query, key, value, lists, width**-0.5)
    assert torch.allclose(result.double(), expected, atol=1e-5)


def test_ranges_of_one_list_may_overlap(way: str):
    key, value = pools(50, 2, 16)
    slots = torch.randperm(50, generator=generator()).int()
    starts, ends = torch.tensor([0, 0, 10], dtype=torch.int32), torch.tensor([50, 20, 50], dtype=torch.int32)
    query = random(3, 4, 16)
    result = kernels.attend(query, key, value, kernels.Visible(slots, starts, ends), 0.25)
    lists = [slots[a:b].tolist() for a, b in zip(starts, ends, strict=True)]
    assert error(result.double(), exact_attention(query, key, value, lists, 0.25)) < 1e-5


def test_pools_may_be_slices_of_a_larger_one(way: str):
    pool = random(30, 2, 3, 8)
    query, lists = random(2, 6, 8), [[1, 2, 29], [7]]
    result = kernels.paged_attention(query, pool[:, 0], pool[:, 1], *as_lists(lists), scale=0.4)
    assert error(result.double(), exact_attention(query, pool[:, 0], pool[:, 1], lists, 0.4)) < 1e-5


def test_huge_scores_neither_overflow_nor_vanish(way: str):
    key, value = pools(100, 1, 16)
    query, lists = 1e3 * random(1, 2, 16), [list(range(100))]
    result = kernels.paged_attention(query, key, value, *as_lists(lists), scale=1.0)
    assert error(result.double(), exact_attention(query, key, value, lists, 1.0)) < 1e-4


def test_an_entry_does_not_depend_on_the_batch_nor_on_threads(compiled: None):
    key, value = pools(500, 2, 32)
    lists = [torch.randperm(500, generator=generator(i))[: 40 * i + 1].tolist() for i in range(9)]
    query = random(9, 6, 32)
    alone = [kernels.paged_attention(query[i : i + 1], key, value, *as_lists([lists[i]]), scale=0.2) for i in range(9)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(
                kernels.paged_attention(query, key, value, *as_lists(lists), scale=0.2), torch.cat(alone)
            )
    finally:
        torch.set_num_threads(before)


# A whole block


def backbone(family: str) -> BackboneConfig:
    return BackboneConfig(
        family=family,
        vocab_size=32,
        hidden_size=36,
        intermediate_size=50,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        rms_norm_eps=1e-5,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
    )


def one_step(entries: int, width: int) -> kernels.Step:
    """Entries of one document: entry i stores at slot 3 i + 1 and sees what entries 0 to i store."""
    targets = torch.arange(entries, dtype=torch.int32) * 3 + 1
    visible = kernels.Visible(targets, torch.zeros_like(targets), torch.arange(1, entries + 1, dtype=torch.int32))
    angles = random(entries, width // 2).repeat(1, 2)
    return kernels.Step(angles.cos(), angles.sin(), targets, visible)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("entries", [1, 2, 19])
def test_a_packed_block_equals_the_models_block(way: str, family: str, entries: int):
    block = Block(backbone(family))
    torch.manual_seed(0)
    initialise_backbone(block, 0.2)
    for weights in block.parameters():
        if weights.dim() == 1:
            weights.copy_(1 + 0.3 * torch.randn(weights.shape))
    step, hidden = one_step(entries, 10), random(entries, 36, seed=4)
    key_pool, value_pool = torch.zeros(64, 2, 10), torch.zeros(64, 2, 10)

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(0, 1)

    expected, key, value = block(hidden, step.cosine, step.sine, causal)
    result = kernels.PackedBlock(block)(hidden.clone(), step, key_pool, value_pool)
    targets = step.targets.long()
    assert error(result, expected) < 1e-5
    assert error(key_pool[targets], key) < 1e-5
    assert error(value_pool[targets], value) < 1e-5
    key_pool[targets] = 0
    assert not key_pool.any()


@EVERY_STORAGE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_in_one_call_equals_its_stepwise_twin(compiled: None, storage: kernels.Storage, dtype: torch.dtype):
    torch.manual_seed(1)
    packed = kernels.PackedBlock(Block(backbone("qwen3")), storage)
    step, hidden = one_step(7, 10), random(7, 36)
    fast, slow = (tuple(torch.zeros(32, 2, 10, dtype=dtype) for _ in range(2)) for _ in range(2))
    result = packed(hidden.clone(), step, *fast)
    expected = packed.stepwise(hidden.clone(), step, *slow)
    assert error(result, expected) < (1e-5 if dtype == torch.float32 else 2**-8)
    for a, b in zip(fast, slow, strict=True):
        assert error(a.float(), b.float()) < (1e-5 if dtype == torch.float32 else 2**-7)


# The yardstick


def test_the_yardstick_reads_every_number(way: str):
    reader = kernels.Reader(70_000)
    reader.memory.fill_(1.0)
    assert reader.read() == 70_000
    assert reader.bandwidth(1) > 0


# Building


@pytest.mark.slow
def test_importing_compiles_nothing(tmp_path: Path):
    script = "import tah2.engine.kernels"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "TAH2_CACHE_DIR": str(tmp_path)})
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_compiling_at_once_leaves_one_library(compiled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAH2_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        paths = {future.result() for future in [pool.submit(build._built) for _ in range(2)]}
    assert paths == set((tmp_path / "kernels").iterdir())
    assert ctypes.CDLL(str(paths.pop())).tah2_vector_width() in (4, 8, 16)


@pytest.fixture
def _fresh_build() -> Iterator[None]:
    build._compiled.cache_clear()
    yield
    build._compiled.cache_clear()


@pytest.mark.usefixtures("_fresh_build")
@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C\\+\\+ compiler"), ("false", "failed")])
def test_without_a_working_compiler_stock_pytorch_runs_and_says_why_once(
    compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TAH2_CACHE_DIR", str(tmp_path))
    weight, x = random(5, 4), random(2, 4)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(kernels.pack_linear(weight)(x), F.linear(x, weight))
        assert not kernels.available()
    (record,) = caplog.records
    assert "stock PyTorch" in record.getMessage()
    assert re.search(reason, record.getMessage())


def test_memory_is_aligned_zeroed_and_outlives_its_arena():
    arena = memory.Arena()
    tensors = [arena.empty((n, 3), torch.float32) for n in (1, 7, 5000)] + [arena.empty((3, 5), torch.int8)]
    tensors.append(arena.empty((memory.CHUNK,), torch.int8))
    del arena
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % memory.LINE == 0
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors))
