import json
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import yaml

from tah2.config.strict import ConfigError, build
from tah2.data import dataset, sources
from tah2.data.config import BatchConfig, DataConfig, SourceConfig
from tah2.data.dataset import load_data
from tah2.data.report import DataError, DataReport
from tah2.data.sources import open_source
from tah2.data.streaming import stream_data

from . import conftest
from .conftest import REAL_DATA, chat, write_lines

PAPER = """
sources:
  - id: a-m-team/AM-Qwen3-Distilled
    files: [math.jsonl, code.jsonl]
    columns: {system: ""}
    weight: 0.75
  - id: nvidia/Nemotron-Agentic-v1
    files: ["data/*.jsonl"]
    weight: 0.25
validation_samples: 4
validation_fraction_cap: 0.5
"""


def rows(count, prefix="r"):
    return [{"id": f"{prefix}{i}", "messages": chat(f"question {i}", "two " * (i % 5 + 1))} for i in range(count)]


def config(path, **options):
    return DataConfig((SourceConfig(path=str(path)),), **{"validation_samples": 0, **options})


def test_every_row_is_counted_and_bad_rows_are_shown(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", [*rows(3), {"messages": chat("a", "two " * 100)}, {"x": 1}])
    with path.open("ab") as handle:
        handle.write(b"\n{broken\n[1]\n")
    data = load_data(config(path, max_tokens=60), tokenizer)
    total = data.report.total
    assert (total.read, total.kept, total.too_long, total.bad) == (7, 3, 1, 3)
    assert total.tokens == data.store.lengths.sum()
    assert total.supervised_tokens == data.store.supervised.sum() > 0
    assert data.store.names == ("r0", "r1", "r2")
    assert data.report.reasons == {"unknown format": 1, "not JSON": 1, "not an object": 1}
    assert f"{path}:7: not JSON" in data.report.bad_rows[1]
    told = data.report.describe()
    assert "7 rows read" in told
    assert "1 were longer" in told
    assert "1 not JSON" in told


def test_bad_rows_can_be_fatal(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", [*rows(1), {"x": 1}])
    with pytest.raises(DataError, match=r"rows.jsonl:2: unknown format"):
        load_data(config(path, on_bad_rows="fail"), tokenizer)


def test_lines_end_at_newlines_alone(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": chat("a\u2028b\x85c", "d\u2029e")}] * 2)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    data = load_data(config(path), tokenizer)
    assert data.report.total.kept == 2
    assert "a\u2028b\x85c" in tokenizer.decode(data.store.sample(0).ids)


def test_data_without_a_supervised_token_aborts(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", rows(3))
    template = tmp_path / "template.jinja"
    template.write_text(conftest.MARKED.replace("generation %}{{ m.content }}<|im_end|>", "generation %}"))
    with pytest.raises(DataError, match="Not one token"):
        load_data(config(path, chat_template=template), tokenizer)
    with pytest.raises(DataError, match="No row of the data"):
        load_data(config(path, max_tokens=2), tokenizer)


def test_validation_is_held_out_and_fixed_by_the_seed(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", rows(40))
    data = load_data(config(path, validation_samples=1000, validation_fraction_cap=0.25), tokenizer)
    train = {data.store.names[i] for i in data.train_groups[0]}
    assert len(data.validation) == 10
    assert not train & set(data.validation.names)
    assert len(train) == 30
    steps = list(islice(data.steps(BatchConfig(8, 200)), 4))
    assert {name for step in steps for batch in step.micro_batches for name in batch.samples} == train
    validation = {name for batch in data.validation_batches(BatchConfig(8, 200)) for name in batch.samples}
    assert validation == set(data.validation.names)


def test_the_mixture_of_the_paper_is_expressible_by_id(tmp_path, tokenizer, monkeypatch):
    am = [
        {
            "system": "Use tags.",
            "conversations": [{"from": "human", "value": f"q{i}"}, {"from": "assistant", "value": "two"}],
        }
        for i in range(6)
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "one", "reasoning_content": "u"},
    ]
    # The tools of two rows differ in shape, which one Arrow table could not hold.
    tools = [[{"function": {"name": "f", "parameters": {"x": x}}}] for x in (1, "a", {"y": [2]})]
    nemotron = [{"uuid": f"u{i}", "messages": turns, "tools": tools[i % 3]} for i in range(6)]
    hub = {
        "a-m-team/AM-Qwen3-Distilled/math.jsonl": am[:3],
        "a-m-team/AM-Qwen3-Distilled/code.jsonl": am[3:],
        "nvidia/Nemotron-Agentic-v1/data/tool_calling.jsonl": nemotron,
    }

    class Hub:
        @staticmethod
        def hf_hub_download(repo, name, repo_type, revision):
            (tmp_path / repo / name).parent.mkdir(parents=True, exist_ok=True)
            return str(write_lines(tmp_path / repo / name, hub[f"{repo}/{name}"]))

        @staticmethod
        def HfApi():
            return Hub

        @staticmethod
        def list_repo_files(repo, repo_type, revision):
            return ["README.md", *(key.removeprefix(f"{repo}/") for key in hub if key.startswith(repo))]

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    tokenizer = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = conftest.QWEN
    parsed = build(DataConfig, yaml.safe_load(PAPER))
    data = load_data(parsed, tokenizer)
    assert data.report.total.kept == 12
    assert data.report.of("nvidia/Nemotron-Agentic-v1").kept == 6
    assert data.shares == (0.75, 0.25)
    assert len(data.validation) == 4
    assert data.size.samples == 8
    text = tokenizer.decode(data.store.sample(7).ids)
    assert "<think>\nt\n</think>" in text
    assert "Use tags" not in tokenizer.decode(data.store.sample(0).ids)


def test_parquet_rows_lose_the_nulls_of_arrow(tmp_path, tokenizer):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g", "arguments": {"y": "2"}}}]
    table = [{"messages": [*chat("q"), {"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls]
    parquet.write_table(arrow.Table.from_pylist(table), tmp_path / "rows.parquet")
    loaded = [raw.load() for raw in open_source(SourceConfig(path=str(tmp_path))).rows()]
    assert [row["messages"][1]["tool_calls"][0] for row in loaded] == calls
    qwen = tmp_path / "qwen.jinja"
    qwen.write_text(conftest.QWEN)
    data = load_data(config(tmp_path / "rows.parquet", chat_template=qwen), tokenizer)
    assert '{"name": "g", "arguments": {"y": "2"}}' in tokenizer.decode(data.store.sample(1).ids)


def test_data_sets_of_the_library_are_read_row_by_row(tokenizer, monkeypatch):
    library = pytest.importorskip("datasets")
    asked = []

    def load(name, configuration, **options):
        asked.append((name, configuration, options))
        return library.Dataset.from_list(rows(6))

    monkeypatch.setattr(library, "load_dataset", load)
    source = SourceConfig(id="owner/name", name="main", split="test", limit=4)
    data = load_data(DataConfig((source,), validation_samples=0), tokenizer)
    assert asked == [("owner/name", "main", {"split": "test", "revision": None, "streaming": False})]
    assert data.store.names == ("r0", "r1", "r2", "r3")


def test_a_missing_library_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="extra 'data'"):
        open_source(SourceConfig(id="owner/name"))


def test_files_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no data files"):
        open_source(SourceConfig(path=str(tmp_path / "nothing.jsonl")))
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"end in \.jsonl or \.parquet"):
        open_source(SourceConfig(path=str(tmp_path / "rows.csv")))


def test_the_cache_is_used_until_an_input_changes(tmp_path, tokenizer, monkeypatch):
    path = write_lines(tmp_path / "rows.jsonl", rows(9))
    cached = config(path, cache_dir=tmp_path / "cache", validation_samples=2, validation_fraction_cap=0.5)
    first = load_data(cached, tokenizer)
    reads = []
    monkeypatch.setattr(dataset, "_read_all", lambda *inputs: reads.append(inputs) or (first.store, DataReport()))
    again = load_data(cached, tokenizer)
    assert not reads
    assert np.array_equal(again.store.ids, first.store.ids)
    assert again.report.total == first.report.total
    assert again.fingerprint == first.fingerprint
    load_data(config(path, cache_dir=tmp_path / "cache", train_on="all"), tokenizer)
    write_lines(path, rows(10))
    load_data(cached, tokenizer)
    assert len(reads) == 2


def test_a_report_survives_json():
    report = DataReport()
    report.of("a").read = 3
    report.add_bad("a", "a:1", sources.BadRow("not JSON", "why"))
    assert DataReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sources": []}, "at least one data source"),
        ({"sources": [{}]}, "either a 'path'"),
        ({"sources": [{"path": "a", "id": "b/c"}]}, "either a 'path'"),
        ({"sources": [{"path": "a", "files": ["b"]}]}, "belong to an 'id'"),
        ({"sources": [{"path": "a", "columns": {"mesages": "m"}}]}, "did you mean 'messages'"),
        ({"sources": [{"path": "a", "weight": 0}]}, "must be positive"),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "every data source a 'weight' or none"),
        ({"sources": [{"path": "a"}, {"path": "b"}], "streaming": True}, "streamed mixture"),
        ({"sources": [{"path": "a"}], "train_on": "user"}, "must be one of"),
        ({"sources": [{"path": "a"}], "max_tokens": 1}, "max_tokens"),
    ],
)
def test_wrong_settings_are_one_sentence(data, message):
    with pytest.raises(ConfigError, match=message):
        build(DataConfig, data)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="the shared data are not here")
@pytest.mark.parametrize(("name", "kept"), [("glaive_toolcall", 300), ("reason_tool_use", 50), ("mbpp_train", 257)])
def test_real_files_are_read_completely(name, kept, tokenizer, tmp_path):
    qwen = tmp_path / "qwen.jinja"
    qwen.write_text(conftest.QWEN)
    data = load_data(config(REAL_DATA / f"{name}.jsonl", chat_template=qwen, max_tokens=100_000), tokenizer)
    total = data.report.total
    assert (total.read, total.kept, total.bad) == (kept, kept, 0)
    sample = data.store.sample(0)
    assert tokenizer.decode(sample.ids[sample.mask]).endswith("<|im_end|>")


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_may_have_files_of_its_own(tmp_path, tokenizer, streaming):
    held_out = write_lines(tmp_path / "validation.jsonl", [*rows(3, "v"), {"x": 1}])
    training = write_lines(tmp_path / "train.jsonl", rows(5))
    chosen = config(training, validation_sources=(SourceConfig(path=str(held_out)),), validation_samples=2)
    open_data = stream_data if streaming else load_data
    data = open_data(replace(chosen, streaming=streaming), tokenizer)
    assert set(data.validation.names) == {"v0", "v1", "v2"}
    names = {name for step in islice(data.steps(BatchConfig(5)), 1) for b in step.micro_batches for name in b.samples}
    assert names == {f"r{i}" for i in range(5)}
    assert data.report.validation.total.bad == 1
    told = data.report.describe()
    assert "For validation: 4 rows read" in told
    assert "held out" not in told
    assert DataReport.from_dict(json.loads(json.dumps(data.report.to_dict()))) == data.report


def test_validation_files_have_no_weight():
    with pytest.raises(ConfigError, match="'limit' instead of a 'weight'"):
        DataConfig((SourceConfig(path="a"),), validation_sources=(SourceConfig(path="b", weight=1.0),))
