"""Records outlive the process that writes them, and seeds belong to samples."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tah2.config.strict import ConfigError
from tah2.evals.records import (
    ERROR,
    RecordFile,
    SampleRecord,
    depth_counts,
    drop_torn_line,
    same_samples,
    sample_seed,
)


def record(problem: str = "p1", repeat: int = 0, **changes: object) -> SampleRecord:
    made = SampleRecord(
        task="toy",
        problem=problem,
        repeat=repeat,
        seed=sample_seed(0, "toy", problem, repeat),
        prompt_tokens=3,
        prompt_depth_counts=[2, 1],
        token_ids=[5, 6, 7],
        depths=[1, 2, 1],
        text="naïve \u2028 line",
        finish_reason="stop",
        decode_flops=123,
        seconds=0.5,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_records_come_back_as_they_were_written(tmp_path: Path):
    file = RecordFile(tmp_path / "samples" / "toy.jsonl")
    written = [record("p2", 1), record("p1", 0, extra={"turns": [[1], [2, 3]]}), record("p1", 1)]
    with file:
        for each in written:
            file.append(each)
    assert list(RecordFile(file.path)) == written
    assert [each.key for each in file.read()] == [("p1", 0), ("p1", 1), ("p2", 1)]
    assert file.keys() == {each.key for each in written}


@given(cut=st.integers(min_value=0, max_value=800))
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int):
    path = tmp_path_factory.mktemp("cut") / "toy.jsonl"
    with RecordFile(path) as file:
        for repeat in range(4):
            file.append(record(repeat=repeat))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    lines = whole[:cut].count(b"\n")
    assert len(RecordFile(path).read()) == lines
    with RecordFile(path) as file:
        for repeat in range(lines, 4):
            file.append(record(repeat=repeat))
    assert path.read_bytes() == whole


def test_a_last_line_longer_than_a_block_is_dropped_whole(tmp_path: Path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 200_000)
    drop_torn_line(path)
    assert path.read_bytes() == b'{"a": 1}\n'
    path.write_bytes(b"x" * 70_000)
    drop_torn_line(path)
    assert path.read_bytes() == b""


def test_a_failed_sample_is_generated_again_and_the_later_record_counts(tmp_path: Path):
    file = RecordFile(tmp_path / "toy.jsonl")
    with file:
        file.append(record(finish_reason=ERROR))
        file.append(record("p2"))
        assert file.keys() == {("p2", 0)}
        file.append(record(text="better"))
    assert file.keys() == {("p1", 0), ("p2", 0)}
    assert [each.text for each in file.read()] == ["better", record("p2").text]


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "toy.jsonl"
    with RecordFile(path) as file:
        file.append(record())
    path.write_bytes(path.read_bytes() + b'{"task": "toy"}\n')
    with pytest.raises(ConfigError, match="Line 2 of"):
        RecordFile(path).read()


def test_samples_are_compared_without_their_timings():
    assert same_samples([record(seconds=1.0)], [record(seconds=9.0, first_token_seconds=1.0)])
    assert not same_samples([record()], [record(depths=[1, 1, 1])])
    assert not same_samples([record()], [record(), record(repeat=1)])


def test_seeds_differ_between_repeats_and_depend_on_everything():
    repeats = [sample_seed(0, "aime24", "p", repeat) for repeat in range(4096)]
    assert len(set(repeats)) == 4096
    assert all(0 <= seed < 2**31 for seed in repeats)
    assert sample_seed(0, "aime24", "p", 3) == repeats[3]
    some = [sample_seed(*parts) for parts in product((0, 1), ("a", "b"), ("p", "q"), (0, 1))]
    assert len(set(some)) == len(some)
    assert sample_seed(0, "ab", "c", 0) != sample_seed(0, "a", "bc", 0)


def test_depths_are_counted_by_iteration():
    assert depth_counts([1, 3, 1, 2, 3, 3], 4) == [2, 1, 3, 0]
