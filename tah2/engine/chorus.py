"""A server's engine over several ranks: rank 0 is spoken to, the others repeat its calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tah2.config.strict import ConfigError
from tah2.engine.engine import Engine
from tah2.engine.outputs import RequestOutput
from tah2.engine.params import SamplingParams


class Leader:
    """Rank 0's engine; every call reaches the ranks that `follow`. Call `close` at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> None:
        self._everywhere("add_request", request_id, prompt, params)

    def abort(self, request_id: str) -> RequestOutput | None:
        return self._everywhere("abort", request_id)

    def preempt(self, request_id: str) -> None:
        self._everywhere("preempt", request_id)

    def step(self, stream: bool = True) -> list[RequestOutput]:
        return self._everywhere("step", stream)

    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests()

    def close(self) -> None:
        """Let the followers go."""
        self.engine.team.agree(None)

    def _everywhere(self, name: str, *arguments: Any) -> Any:
        self.engine.team.agree((name, arguments))
        return getattr(self.engine, name)(*arguments)


def follow(engine: Engine) -> None:
    """Repeat what rank 0's `Leader` does until it closes; a request that it refuses is refused here too."""
    nothing: tuple[str, tuple[Any, ...]] | None = None
    while (call := engine.team.agree(nothing)) is not None:
        name, arguments = call
        with suppress(ConfigError):
            getattr(engine, name)(*arguments)
