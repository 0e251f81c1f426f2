"""The order in which the backends that need one lay entries out."""

from __future__ import annotations

from torch import Tensor

from tah2.visibility import Entries


def reading_order(entries: Entries) -> Tensor:
    """Indices that sort entries by (document, position, depth): what a query may read is then mostly a prefix."""
    stride = int(entries.depth.max()) + 1
    places = entries.position * stride + entries.depth
    return (entries.document * (int(places.max()) + 1) + places).argsort(stable=True)
