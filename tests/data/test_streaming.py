from itertools import chain, islice

import pytest

from tah2.config.strict import ConfigError
from tah2.data.batches import Rank
from tah2.data.config import BatchConfig, DataConfig, SourceConfig
from tah2.data.dataset import load_data
from tah2.data.report import DataError
from tah2.data.streaming import stream_data

from .conftest import write_lines
from .test_dataset import rows

BATCH = BatchConfig(4, 100)


def taken(steps):
    return [sorted(name for batch in step.micro_batches for name in batch.samples) for step in steps]


@pytest.fixture
def config(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [*rows(20), {"x": 1}])
    return DataConfig(
        (SourceConfig(path=str(path)),), streaming=True, shuffle_buffer=6, validation_samples=4, max_tokens=200
    )


def test_a_round_holds_every_training_row_once_and_no_validation_row(config, tokenizer):
    data = stream_data(config, tokenizer)
    held_out = set(data.validation.names)
    assert len(held_out) == 4
    steps = list(islice(data.steps(BATCH), 8))
    first, second = (sorted(chain(*taken(steps)[part])) for part in (slice(0, 4), slice(4, 8)))
    assert first == second == sorted({f"r{i}" for i in range(20)} - held_out)
    assert taken(steps)[:4] != taken(steps)[4:]
    assert [step.state.epoch for step in steps] == [0] * 4 + [1] * 4
    assert data.report.total.bad >= 2


def test_streams_resume_at_the_exact_row_on_other_ranks(config, tokenizer):
    steps = list(islice(stream_data(config, tokenizer).steps(BATCH), 7))
    state = steps[2].state
    resumed = [list(islice(stream_data(config, tokenizer).steps(BATCH, Rank(r, 2), state), 4)) for r in range(2)]
    for number in range(4):
        assert sorted(chain(*(taken(ranked)[number] for ranked in resumed))) == taken(steps)[3 + number]
        assert resumed[0][number].supervised_tokens == steps[3 + number].supervised_tokens
        assert len(resumed[0][number].micro_batches) == len(resumed[1][number].micro_batches)


def test_a_streamed_mixture_keeps_its_shares(tmp_path, tokenizer):
    paths = [write_lines(tmp_path / f"{name}.jsonl", rows(10, name)) for name in "ab"]
    weighted = tuple(SourceConfig(path=str(path), weight=w) for path, w in zip(paths, (3, 1), strict=True))
    data = stream_data(DataConfig(weighted, streaming=True, validation_samples=0), tokenizer)
    names = list(chain(*taken(islice(data.steps(BATCH), 100))))
    share = sum(name.startswith("a") for name in names) / len(names)
    assert 0.68 < share < 0.82
    assert data.size.samples is None
    assert data.size.tokens_per_sample > 0


def test_a_stream_without_a_usable_row_ends_with_an_error(config, tokenizer, tmp_path):
    bad = write_lines(tmp_path / "bad.jsonl", [{"x": 1}] * 3)
    useless = DataConfig((SourceConfig(path=str(bad)),), streaming=True, validation_samples=0)
    with pytest.raises(DataError, match="no row left to train on"):
        next(stream_data(useless, tokenizer).steps(BATCH))
    hopeless = write_lines(tmp_path / "hopeless.jsonl", [{"x": 1}] * 1200)
    with pytest.raises(DataError, match="No row of the data"):
        stream_data(DataConfig((SourceConfig(path=str(hopeless)),), streaming=True), tokenizer)
    empty = DataConfig((SourceConfig(path=str(write_lines(tmp_path / "e.jsonl", []))),), streaming=True)
    with pytest.raises(DataError, match="has no rows"):
        stream_data(empty, tokenizer)


def test_a_stream_too_short_for_its_validation_set_is_refused(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", rows(5))
    with pytest.raises(ConfigError, match="lower 'validation_samples'"):
        stream_data(DataConfig((SourceConfig(path=str(path)),), streaming=True), tokenizer)


def test_the_two_ways_to_open_data_are_not_mixed_up(config, tokenizer):
    with pytest.raises(ConfigError, match="stream_data"):
        load_data(config, tokenizer)
