"""Streaming chats from many users, for locust:

locust -f benchmarks/load_locust.py --host http://127.0.0.1:8000 --headless -u 50 -r 10 -t 60s

Beside locust's own table it reports the time to the first chunk and the mean time between chunks.
"""

from __future__ import annotations

import json
import time

from locust import HttpUser, between, task

QUESTIONS = ("Why do loops help?", "Name a river.", "Count to nine.", "What is a decider?")


class Talker(HttpUser):
    wait_time = between(0.1, 1.0)

    @task
    def chat(self) -> None:
        question = QUESTIONS[int(time.monotonic() * 1000) % len(QUESTIONS)]
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 48, "stream": True}
        started, first, chunks, done = time.perf_counter(), 0.0, 0, False
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            for line in answer.iter_lines():
                if line == b"data: [DONE]":
                    done = True
                elif line:
                    problem = json.loads(line.removeprefix(b"data: ")).get("error")
                    if problem is not None:
                        answer.failure(problem["message"])
                        return
                    chunks, first = chunks + 1, first or time.perf_counter()
            if not done:
                answer.failure(f"status {answer.status_code}, no [DONE]")
                return
        self._report("time to first chunk", first - started)
        self._report("time between chunks", (time.perf_counter() - first) / max(1, chunks - 1))

    def _report(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="STREAM",
            name=name,
            response_time=1000 * seconds,
            response_length=0,
            exception=None,
            context={},
        )
