"""All attention backends compute what the dense reference computes, with linear memory where they promise it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tah2.config.strict import ConfigError
from tah2.model.attention import attention_backend, tiles
from tah2.model.attention.auto import GpuBackend
from tah2.model.attention.dense import DenseBackend
from tah2.model.attention.flex import FlexBackend, FlexPlan
from tah2.model.attention.tiles import TileBackend, TilePlan
from tah2.visibility import DUO_CAUSAL, PER_ITERATION, RULES, Entries

HEADS, KV_HEADS, WIDTH = 4, 2, 8
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def a_pass(lengths: list[int], depth: int, seed: int, lookahead: bool = False) -> tuple[Entries, Entries]:
    """Queries at `depth` of random depth profiles, and the keys of all that was executed, in shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    last = torch.randint(1, depth + 1, positions.shape, generator=generator)
    last[0] = depth
    executed = [Entries.of(documents[last >= j], positions[last >= j], j, last[last >= j]) for j in range(1, depth + 1)]
    if lookahead:
        chosen = last == depth - 1 if (last == depth - 1).any() else last == depth
        query = Entries.of(documents[chosen], positions[chosen], depth, lookahead=True)
        key = Entries.cat([*executed, query])
    else:
        query, key = executed[-1], Entries.cat(executed)
    return (
        query[torch.randperm(len(query), generator=generator)],
        key[torch.randperm(len(key), generator=generator)],
    )


def inputs(query: Entries, key: Entries, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    q = torch.randn(len(query), HEADS, WIDTH, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(len(key), KV_HEADS, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def agree(rule, query: Entries, key: Entries) -> None:
    values = inputs(query, key)
    results = []
    for backend in (DenseBackend(), TileBackend()):
        out = backend.plan(rule, query, key).attend(*values)
        results.append((out, *torch.autograd.grad((out * torch.arange(WIDTH)).square().sum(), values)))
    for reference, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=["masks kept", "tiles recomputed"])
def masks(request, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tiles recomputed":
        monkeypatch.setattr(tiles, "KEPT_MASK_CELLS", 0)
    return request.param


@rules
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_tiles_agree_with_dense_forward_and_backward(rule, depth: int, lookahead: bool, masks: str):
    agree(rule, *a_pass([7, 1, 12, 40, 3], depth + lookahead, seed=depth, lookahead=lookahead))


@rules
def test_long_documents_are_cut_into_pieces(rule, masks: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "QUERIES", 16)
    query, key = a_pass([90, 2, 37], 2, seed=0)
    assert len(TileBackend().plan(rule, query, key).tiles) > 3
    agree(rule, query, key)


@rules
def test_many_short_documents_share_tiles(rule, masks: str):
    query, key = a_pass([1 + i % 5 for i in range(60)], 2, seed=3)
    plan = TileBackend().plan(rule, query, key)
    assert len(plan.tiles) < 15
    agree(rule, query, key)


@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_tiles_agree_with_dense_on_any_pass(name: str, lengths: list[int], depth: int, lookahead: bool, seed: int):
    agree(RULES[name], *a_pass(lengths, depth + lookahead, seed, lookahead))


def test_a_decoding_step_reads_long_pasts():
    """One query per document, each with a past of its own length."""
    lengths = [300, 1, 17, 290]
    documents = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    key = Entries.of(documents, torch.cat([torch.arange(n) for n in lengths]), 1)
    last = torch.tensor(lengths).cumsum(0) - 1
    agree(DUO_CAUSAL, key[last], key)


@rules
@pytest.mark.parametrize("lookahead", [False, True])
def test_flex_agrees_with_dense(rule, lookahead: bool):
    query, key = a_pass([7, 1, 150, 3], 2, seed=5, lookahead=lookahead)
    q, k, v = inputs(query, key)
    with torch.no_grad():
        reference = DenseBackend().plan(rule, query, key).attend(q, k, v)
        torch.testing.assert_close(
            FlexBackend().plan(rule, query, key).attend(q, k, v), reference, rtol=1e-4, atol=1e-4
        )


def test_one_pass_of_whole_documents_needs_no_mask():
    entries = Entries.of(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1]), 1)
    plan = TileBackend().plan(DUO_CAUSAL, entries, entries)
    assert all(tile.mask is None for tile in plan.tiles)
    deeper = Entries.of(entries.document, entries.position, 2)
    assert all(tile.mask is None for tile in TileBackend().plan(PER_ITERATION, deeper, deeper).tiles)
    agree(DUO_CAUSAL, entries, entries)


def saved_bytes(tokens: int) -> int:
    """Bytes of distinct storage that one layer of a two-depth pass over one document keeps for backward."""
    query, key = a_pass([tokens], 2, seed=0)
    plan = TileBackend().plan(DUO_CAUSAL, query, key)
    values = inputs(query, key)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        plan.attend(*values)
    return sum(storages.values())


def test_memory_kept_for_backward_is_linear_in_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "KEPT_MASK_CELLS", 0)
    one, two, four = saved_bytes(1024), saved_bytes(2048), saved_bytes(4096)
    assert two < 2.2 * one
    assert four < 2.2 * two


def test_kept_masks_are_bounded_and_shared_by_layers():
    query, key = a_pass([1500], 2, seed=0)
    plan: TilePlan = TileBackend().plan(DUO_CAUSAL, query, key)
    assert not plan.recomputes
    masks = [tile.mask for tile in plan.tiles if tile.mask is not None]
    plan.attend(*inputs(query, key))
    kept = [mask.kept for mask in masks]
    plan.attend(*inputs(query, key))
    assert all(mask.kept is before for mask, before in zip(masks, kept, strict=True))
    assert sum(mask.numel() for mask in kept if mask is not None) <= tiles.KEPT_MASK_CELLS
    assert TileBackend().plan(DUO_CAUSAL, *a_pass([4000], 2, seed=0)).recomputes


def test_backends_are_chosen_by_name():
    assert isinstance(attention_backend("auto"), TileBackend)
    assert isinstance(attention_backend("auto", "cuda"), GpuBackend)
    with pytest.raises(ConfigError, match="did you mean 'tiles'"):
        attention_backend("tile")


def test_the_gpus_choice_is_flash_for_plain_causal_passes_and_block_masks_elsewhere() -> None:
    first = Entries.of(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), 1)
    second = Entries.of(torch.tensor([0]), torch.tensor([1]), 2)
    gpu = attention_backend("auto", "cuda")
    assert isinstance(gpu.plan(DUO_CAUSAL, first, first), TilePlan)
    assert isinstance(gpu.plan(DUO_CAUSAL, second, Entries.cat([first, second])), FlexPlan)
    assert isinstance(attention_backend("auto", "cpu"), TileBackend)
