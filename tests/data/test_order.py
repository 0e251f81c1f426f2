import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tah2.config.strict import ConfigError, build, plain
from tah2.data.batches import Rank, evaluation_batches, training_steps
from tah2.data.config import BatchConfig
from tah2.data.order import LoaderState, SampleOrder, held_out, shuffled, split_by_share
from tah2.data.store import TokenStore

from .test_packing import make


def names(steps):
    return [sorted(name for batch in step.micro_batches for name in batch.samples) for step in steps]


def setup(lengths=(3, 9, 4, 4, 7, 2, 5), samples=4, budget=10):
    store = TokenStore.of(make(lengths))
    return store, SampleOrder([np.arange(len(store))], seed=3), BatchConfig(samples, budget)


@given(st.integers(0, 200), st.integers(0, 5))
def test_shuffling_is_a_permutation_fixed_by_its_keys(count, key):
    order = shuffled(count, key)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == shuffled(count, key).tolist()


def test_orders_of_epochs_and_seeds_differ():
    orders = {tuple(shuffled(50, seed, 0, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_an_epoch_holds_every_sample_once_and_batches_run_on_into_the_next():
    order = SampleOrder([np.arange(5)], seed=1)
    taken, epoch, sample = order.take(0, 0, 12)
    assert sorted(taken[:5].tolist()) == sorted(taken[5:10].tolist()) == [0, 1, 2, 3, 4]
    assert (epoch, sample) == (2, 2)


@given(st.integers(1, 30), st.integers(1, 30), st.floats(0.05, 0.95))
def test_shares_are_kept_every_epoch_and_samples_used_equally(first, second, share):
    groups = [np.arange(first), np.arange(first, first + second)]
    order = SampleOrder(groups, [share, 1 - share], seed=2)
    used = np.zeros(first + second, int)
    for epoch in range(4):
        drawn = order.epoch(epoch)
        assert [(drawn < first).sum(), (drawn >= first).sum()] == split_by_share(first + second, [share, 1 - share])
        used += np.bincount(drawn, minlength=first + second)
    for group in groups:
        assert used[group].max() - used[group].min() <= 1


def test_a_weighted_source_without_samples_is_refused():
    with pytest.raises(ConfigError, match="no sample left"):
        SampleOrder([np.arange(4), np.arange(0)], [0.5, 0.5])


def test_global_batches_do_not_depend_on_the_number_of_ranks():
    store, order, config = setup()
    alone = list(islice(training_steps(store, order, config), 5))
    ranks = [list(islice(training_steps(store, order, config, Rank(rank, 3)), 5)) for rank in range(3)]
    for number, step in enumerate(alone):
        together = [ranked[number] for ranked in ranks]
        assert names([step])[0] == sorted(name for part in names(together) for name in part)
        assert len({len(part.micro_batches) for part in together}) == 1
        for part in together:
            assert (part.samples, part.tokens, part.supervised_tokens, part.state) == (
                step.samples,
                step.tokens,
                step.supervised_tokens,
                step.state,
            )
        total = sum(batch.supervised_tokens for part in together for batch in part.micro_batches)
        assert total == step.supervised_tokens == sum(batch.supervised_tokens for batch in step.micro_batches)


def test_resuming_continues_at_the_exact_sample_on_other_ranks():
    store, order, config = setup()
    steps = list(islice(training_steps(store, order, config, fingerprint="f"), 6))
    assert steps[2].state.step == 3
    state = build(LoaderState, json.loads(json.dumps(plain(steps[2].state))))
    resumed = [list(islice(training_steps(store, order, config, Rank(r, 2), state, "f"), 3)) for r in range(2)]
    for number in range(3):
        together = sorted(name for ranked in resumed for name in names(ranked)[number])
        assert together == names(steps)[3 + number]


def test_a_state_of_other_data_is_refused():
    store, order, config = setup()
    with pytest.raises(ConfigError, match="other data"):
        next(training_steps(store, order, config, state=LoaderState(fingerprint="a"), fingerprint="b"))


def test_micro_batches_respect_the_budget_unless_one_sample_exceeds_it():
    store, order, config = setup(lengths=(3, 30, 4, 4), samples=4)
    step = next(training_steps(store, order, config))
    sizes = {batch.samples: len(batch) for batch in step.micro_batches}
    assert sizes[("s1",)] == 30
    assert all(size <= 10 for samples, size in sizes.items() if samples != ("s1",))


def test_a_rank_without_work_runs_a_placeholder():
    store, order, config = setup(lengths=(3, 3), samples=2)
    step = next(training_steps(store, order, config, Rank(2, 3)))
    assert [batch.is_placeholder for batch in step.micro_batches] == [True]
    assert step.supervised_tokens == store.supervised.sum()


def test_evaluation_visits_every_document_once():
    store, _, _ = setup()
    batches = [evaluation_batches(store, 10, Rank(rank, 2)) for rank in range(2)]
    assert len(batches[0]) == len(batches[1])
    seen = sorted(name for ranked in batches for batch in ranked for name in batch.samples)
    assert seen == sorted(store.names)
    assert evaluation_batches(TokenStore.of([]), 10) == ()


def test_the_held_out_set_is_capped_and_depends_on_the_seed():
    assert len(held_out(10_000, 1000, 0.2, 0)) == 1000
    assert len(held_out(50, 1000, 0.1, 0)) == 5
    assert held_out(500, 20, 0.5, 0).tolist() != held_out(500, 20, 0.5, 1).tolist()


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ConfigError):
        Rank(2, 2)
    assert replace(Rank(1, 2), rank=0) == Rank(0, 2)
