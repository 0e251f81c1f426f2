"""Ways to run what has compiled kernels."""

from __future__ import annotations

import pytest

from tah2.engine import kernels


@pytest.fixture(params=["compiled", "stock"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the kernels and without them."""
    if request.param == "stock":
        monkeypatch.setenv("TAH2_NO_KERNELS", "1")
        assert not kernels.available()
    elif not kernels.available():
        pytest.skip("no C++ compiler here")
    return request.param


@pytest.fixture
def compiled() -> None:
    if not kernels.available():
        pytest.skip("no C++ compiler here")
