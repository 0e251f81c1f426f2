"""Connections that say nothing, or never come to the point: a request's head must arrive soon and be small."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 20.0
"""From the opening of a connection, or from the first byte of a further request, to the end of its head."""
HEAD_BYTES = 64 << 10


def patient(head_seconds: float = HEAD_SECONDS, head_bytes: int = HEAD_BYTES) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a bound on heads; bodies are bounded where they are read."""

    class Patient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _alarm: asyncio.TimerHandle | None = None
        _unread = 0
        """Bytes of a head that has not ended."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._idle:
                self._unread = 0
                self._rest()
                return
            self._watch()
            if self.cycle is None or not self.cycle.more_body:  # else the rest of a refused body
                self._unread += len(data)
                if self._unread > head_bytes:
                    self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            super().connection_lost(exc)

        @property
        def _idle(self) -> bool:
            """No request waits for its answer."""
            return self.cycle is None or self.cycle.response_complete

        def _watch(self) -> None:
            if self._alarm is None:
                self._alarm = self.loop.call_later(head_seconds, self.transport.close)

        def _rest(self) -> None:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None

    return Patient
