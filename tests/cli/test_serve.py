"""`tah2 serve` reads its options as it explains them, and says in one sentence what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tah2.cli.frame import main
from tah2.cli.serve import ENGINE_OPTIONS, SERVER_OPTIONS, _parser, configs
from tah2.engine.config import EngineConfig
from tah2.server.app import sampling_defaults
from tah2.server.config import ServerConfig


def test_options_become_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAH2_API_KEY", "from-env")
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    words = [str(tmp_path), "--port", "0", "--served-model-name", "a", "b", "--api-key", "k", "--max-model-len", "512"]
    words += [
        "--max-num-seqs",
        "7",
        "--no-prefix-caching",
        "--chat-template",
        str(template),
        "--allow-origin",
        "http://x",
    ]
    worker, server = configs(_parser().parse_args(words))
    assert worker.engine == {"max_model_len": 512, "max_num_seqs": 7, "enable_prefix_caching": False}
    assert server.served_model_names == ("a", "b")
    assert server.api_keys == ("k", "from-env")
    assert server.chat_template == "{{ messages }}"
    assert server.allow_origins == ("http://x",)
    assert server.host == "127.0.0.1"


def test_every_option_is_a_field():
    assert set(ENGINE_OPTIONS) <= set(EngineConfig.__dataclass_fields__)
    assert set(SERVER_OPTIONS) <= set(ServerConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./no/such/folder"], "There is no folder ./no/such/folder"),
        ([".", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        ([".", "--port", "99999"], "port must lie between"),
        ([".", "--replicas", "0"], "--replicas must be at least 1"),
        ([".", "--request-timeout", "0"], "request_timeout must be positive"),
        ([".", "--drain-timeout", "-1"], "drain_timeout must not be negative"),
        ([".", "--api-key", ""], "An API key must not be empty"),
        ([".", "--chat-template", "absent.jinja"], "absent.jinja: no such file"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_sampling_defaults_are_the_checkpoints(tmp_path: Path):
    assert sampling_defaults(str(tmp_path)) == {}
    wanted = {"temperature": 0.6, "top_k": 20, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(wanted))
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20}
