"""A real server process on 127.0.0.1, and a bare HTTP client for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--device", "cpu", "--threads", "1", "--kernels", "off", "--kv-slots", "20000", "--port", "0")


class ServerProcess:
    """`tah2 serve FOLDER`, ready to be asked."""

    def __init__(self, folder: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tah2", "serve", str(folder), *QUICK, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline()
        found = re.search(r"API at (http://\S+)/v1", greeting)
        assert found is not None, greeting + "".join(self.log)
        self.url = found.group(1)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The log's lines so far."""
        return [json.loads(line) for line in self.log if line.startswith("{")]

    @property
    def worker(self) -> int:
        """The worker's process."""
        return int([event["pid"] for event in self.events if event["event"] == "worker started"][-1])

    def post(self, path: str, /, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, path: str, /, status: int = 400, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        problem: dict[str, Any] = answer.json()["error"]
        assert set(problem) == {"message", "type", "param", "code"}
        assert problem["message"]
        return problem

    def stream(self, path: str, /, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            yield json.loads(line.removeprefix("data: "))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        rows = self.http.get("/metrics").text.splitlines()
        return sum(float(row.rpartition(" ")[2]) for row in rows if re.match(rf"tah2:{name}(\{{|\s)", row))

    def stop(self, patience: float = 30) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
