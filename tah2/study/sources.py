"""Where a base that exists already is found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tah2.config.strict import ConfigError

PACKAGE = "package:"


def local_path(name: str) -> Path | None:
    """The file or folder that `name` means; None for a hub id.

    `package:tah2/assets/base` is a file or folder inside an installed Python package, without importing it.
    """
    if not name.startswith(PACKAGE):
        return Path(name) if Path(name).exists() else None
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{name}: the Python package {package!r} is not installed; install it or name another base.")
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise ConfigError(f"{name}: the package {package!r} is installed, but holds no {inside}.")
    return path
