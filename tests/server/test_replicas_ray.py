"""Two replicas under Ray Serve on this machine: one address, answers as from one server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tah2.config.strict import ConfigError
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tah2.server.config import ServerConfig, WorkerConfig
from tah2.server.replicas_ray import ClusterConfig, app, deployment

PORT = 8947


def test_what_a_cluster_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="at least one replica"):
        ClusterConfig(replicas=0)
    with pytest.raises(ConfigError, match="negative"):
        ClusterConfig(gpus=-1)
    with pytest.raises(ConfigError, match="model=path"):
        app({"replicas": "2"})
    with pytest.raises(ConfigError, match="replicas"):
        app({"replica": "2"})


@pytest.fixture(scope="module")
def url(checkpoint: Path, monkeypatch_module: pytest.MonkeyPatch) -> Iterator[str]:
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    pytest.importorskip("grpc_reflection", reason="ray is installed without its serve extra")
    from ray import serve

    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch_module.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    worker = WorkerConfig(str(checkpoint), {"kv_slots": 20000, "kernels": "off"}, device="cpu", threads=1)
    config = ServerConfig(served_model_names=("tiny",))
    serve.run(deployment(worker, config, ClusterConfig(replicas=2)), name="tah2", route_prefix="/")
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def body(at: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": [at, at + 1, at + 2],
        "temperature": 0.8,
        "seed": 3,
        "max_tokens": 20,
        "return_depths": True,
        **more,
    }


def test_replicas_share_the_work_and_answer_as_one_engine_does(url: str, offline: LLM):
    def ask(at: int) -> dict[str, Any]:
        answer = httpx.post(f"{url}/v1/completions", json=body(at), timeout=60)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(ask, range(24)))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    expected = offline.generate([{"prompt_token_ids": [at, at + 1, at + 2]} for at in range(24)], params)
    assert [choice["depths"] for choice in told] == [output.outputs[0].depths for output in expected]
    assert [choice["text"] for choice in told] == [output.outputs[0].text for output in expected]
    served = {
        line for _ in range(20) for line in httpx.get(f"{url}/metrics").text.splitlines() if "success_total{" in line
    }
    assert len(served) >= 2


def test_streams_pass_through(url: str):
    with httpx.stream("POST", f"{url}/v1/completions", json=body(5, stream=True), timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 10


def test_the_page_and_errors_pass_through(url: str):
    assert "default-src 'none'" in httpx.get(f"{url}/").headers["content-security-policy"]
    answer = httpx.post(f"{url}/v1/completions", json=body(5, max_tokens=100_000))
    assert answer.status_code == 400
    assert "ask for at most" in answer.json()["error"]["message"]
