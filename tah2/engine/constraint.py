"""Constraints on what may come next: an immutable state per position, so that drafts are as easy as outputs."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LogitsMask(Protocol):
    """What a constraint says after the output tokens so far."""

    @property
    def finished(self) -> bool:
        """Nothing may follow."""
        ...

    def allowed(self) -> Tensor:
        """bool `[vocabulary]`; at least one token is allowed unless `finished`."""
        ...

    def after(self, token: int) -> LogitsMask:
        """The state once `token` has been accepted; this state stays valid."""
        ...
