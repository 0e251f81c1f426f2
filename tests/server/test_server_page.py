"""The code on the page about the server runs as printed, against a running server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ServerProcess

pytest.importorskip("openai")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "looped").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        code = compile(block.replace("http://127.0.0.1:8000", server.url), "docs/server.md", "exec", dont_inherit=True)
        exec(code, names)
    said = capsys.readouterr().out
    assert re.search(r"\[\d(, \d)*\]", said)
    assert names["parsed"].choices[0].message.parsed.answer in ("yes", "no")


def test_the_page_names_every_route_and_metric(server: ServerProcess):
    for path in server.http.get("/openapi.json").json()["paths"]:
        assert f"`{path}" in PAGE or f" {path.replace('{model}', 'NAME')}`" in PAGE, path
    for name in re.findall(r"^# TYPE tah2:(\w+)", server.http.get("/metrics").text, re.MULTILINE):
        hidden = ("_created", "engine_steps", "engine_entries")
        assert name in PAGE or any(mark in name for mark in hidden), name
