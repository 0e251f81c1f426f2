import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tah2.config.strict import ConfigError
from tah2.data.balance import first_fit, plan_micro_batches, spread
from tah2.data.packing import IGNORE, PackedBatch, pack, pack_plainly
from tah2.data.store import Sample, TokenStore, load_store, save_store


def make(lengths, seed=0, tagged=False):
    random = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        mask = random.random(length) < 0.6
        mask[0] = False
        ids = random.integers(0, 50, length).astype(np.int32)
        tags = random.integers(1, 9, length).astype(np.int16) if tagged else None
        samples.append(Sample(ids, mask, f"s{number}", tags))
    return samples


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(LENGTHS, st.booleans())
def test_packing_equals_its_plain_twin(lengths, tagged):
    samples = make(lengths, sum(lengths), tagged)
    fast, plain = pack(samples), pack_plainly(samples)
    for name in ("ids", "targets", "document", "position"):
        assert torch.equal(getattr(fast, name), getattr(plain, name)), name
    assert fast.samples == plain.samples
    assert (fast.tags is None) == (plain.tags is None) == (not tagged)
    if tagged:
        assert torch.equal(fast.tags, plain.tags)


def test_a_packed_batch_reads_as_expected():
    first = Sample(np.array([5, 6, 7], np.int32), np.array([False, False, True]), "a")
    second = Sample(np.array([8, 9], np.int32), np.array([False, True]), "b")
    batch = pack([first, second])
    assert batch.ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.targets.tolist() == [IGNORE, 7, IGNORE, 9, IGNORE]
    assert batch.document.tolist() == [0, 0, 0, 1, 1]
    assert batch.position.tolist() == [0, 1, 2, 0, 1]
    assert (len(batch), batch.documents, batch.supervised_tokens) == (5, 2, 2)
    assert batch.to("cpu").samples == ("a", "b")


@given(LENGTHS)
def test_no_target_crosses_documents_and_none_is_lost(lengths):
    samples = make(lengths)
    batch = pack(samples)
    last = torch.cat([batch.document[1:] != batch.document[:-1], torch.tensor([True])])
    assert (batch.targets[last] == IGNORE).all()
    assert batch.supervised_tokens == sum(sample.supervised_tokens for sample in samples)


def test_the_placeholder_is_one_token_without_target():
    batch = PackedBatch.placeholder()
    assert len(batch) == 1
    assert batch.supervised_tokens == 0
    assert batch.is_placeholder
    assert not pack(make([3])).is_placeholder


@given(LENGTHS, st.integers(1, 5), st.integers(1, 20))
def test_every_sample_is_planned_once_within_the_budget_and_ranks_run_alike(lengths, world, budget):
    plan = plan_micro_batches(lengths, world, budget)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    assert len(plan) == world
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for part in rank:
            assert sum(lengths[i] for i in part) <= budget or len(part) == 1


@given(LENGTHS, st.integers(1, 5))
def test_ranks_differ_by_at_most_the_longest_sample(lengths, world):
    loads = [sum(lengths[i] for i in part) for part in spread(range(len(lengths)), lengths, world)]
    assert max(loads) - min(loads) <= max(lengths)


def test_micro_batches_are_few_and_even():
    assert first_fit(range(4), [6, 4, 5, 5], 10) == [[0, 1], [2, 3]]
    (rank,) = plan_micro_batches([4, 4, 4, 4, 4, 4], 1, 20)
    assert sorted(len(part) for part in rank) == [3, 3]


def test_a_store_keeps_its_documents_and_counts(tmp_path):
    samples = make([3, 1, 5], tagged=True)
    store = TokenStore.of(samples, [0, 1, 0])
    assert store.lengths.tolist() == [3, 1, 5]
    assert store.supervised.tolist() == [sample.supervised_tokens for sample in samples]
    assert store.select([2, 0]).names == ("s2", "s0")
    save_store(store, tmp_path / "a" / "store.npz", "a note")
    loaded, notes = load_store(tmp_path / "a" / "store.npz")
    assert notes == "a note"
    for name in ("ids", "mask", "starts", "source", "tags"):
        assert np.array_equal(getattr(loaded, name), getattr(store, name)), name
    assert loaded.names == store.names
    assert isinstance(loaded.ids.base, np.memmap), "the tokens stay in the file"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["store.npz"]


def test_what_is_no_store_is_said_in_one_sentence(tmp_path):
    store = TokenStore.of(make([3, 4]))
    save_store(store, tmp_path / "torn.npz")
    os.truncate(tmp_path / "torn.npz", 200)
    np.savez(tmp_path / "other.npz", weights=store.ids)
    np.savez_compressed(tmp_path / "compressed.npz", ids=store.ids)
    for name in ("torn", "other", "compressed"):
        with pytest.raises(ConfigError, match=f"{name}.npz holds no tokenised documents"):
            load_store(tmp_path / f"{name}.npz")


def test_an_empty_store_survives(tmp_path):
    save_store(TokenStore.of([]), tmp_path / "store.npz")
    assert len(load_store(tmp_path / "store.npz")[0]) == 0


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(np, "savez", lambda file, **arrays: (file.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        save_store(TokenStore.of(make([3])), tmp_path / "store.npz")
    assert list(tmp_path.iterdir()) == []
