"""The house stays in order: imports point downwards, files stay short, nothing names somebody's machine."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tah2

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tah2"
FOLDERS = ("tah2", "tests", "docs", "examples", "benchmarks", "recipes", "results", ".ci")
GENERATED = {"__pycache__", "_build", "_generated"}
LONGEST_FILE = 450

LEVELS = (
    {"config"},
    {"visibility"},
    {"model", "compute"},
    {"objective", "data"},
    {"engine"},
    {"evals", "train", "server"},
    {"distill", "study", "bench"},
    {"cli"},
)
"""Bottom first: a room imports itself and the rooms of lower levels."""

BESIDE = {"compute": {"tah2.model.kinds", "tah2.model.gate", "tah2.model.reentry", "tah2.model.parts"}}
"""What a room may import of its neighbour: the accounting reads the loop kinds and the parts that they name."""

FRONT_DOOR = {"__init__", "__main__", "registration"}
"""Modules of the package itself; they open every room and no room reads more than `__version__` from them."""

MACHINE_PATHS = re.compile(r"(?<![\w.}~-])/(?:work|farm|home|root|Users|opt|mnt)/")
REGISTRY_HOSTS = re.compile(r"python(?:hosted)|pypi\.org/(?:simple)|registry\.(?:npmjs)|deb\.(?:debian)\.org")


def level(room: str) -> int:
    return next(height for height, rooms in enumerate(LEVELS) if room in rooms)


def files(pattern: str) -> Iterator[Path]:
    """Files of the project that match, generated ones left out."""
    yield from (path for path in ROOT.glob(pattern) if path.is_file() and path.name != ".git")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob(pattern)):
            if path.is_file() and not GENERATED.intersection(path.parts):
                yield path


def room_of(path: Path) -> str:
    """`tah2/model/kinds.py` is in `model`, `tah2/visibility.py` is the room `visibility`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(source: str, package: str) -> set[str]:
    """Every module of ours that `source` (a module of `package`) imports, at any depth of the code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return {name for name in found if name.partition(".")[0] == "tah2"}


def complaint(room: str, module: str) -> str | None:
    """Why `room` may not import `module`, or None if it may."""
    if module in ("tah2", "tah2.__version__"):
        return None
    target = module.split(".")[1]
    if target == room:
        return None
    if not any(target in rooms for rooms in LEVELS):
        return f"{room} imports {module}, which is no room of the house"
    neighbour = any(module == name or module.startswith(f"{name}.") for name in BESIDE.get(room, ()))
    if level(target) < level(room) or neighbour:
        return None
    return f"{room} imports {module}, which is not below it"


def test_every_module_has_a_place_in_the_house():
    known = FRONT_DOOR.union(*LEVELS)
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} - known == set()


def test_imports_point_downwards():
    complaints = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if room in FRONT_DOOR:
            continue
        package = ".".join(path.relative_to(ROOT).parent.parts)
        for module in sorted(imported_modules(path.read_text(encoding="utf-8"), package)):
            reason = complaint(room, module)
            if reason:
                complaints.append(f"{path.relative_to(ROOT)}: {reason}")
    assert complaints == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("model", "from tah2.engine import LLM"),
        ("model", "def f():\n    import tah2.cli.frame"),
        ("config", "from tah2 import visibility"),
        ("data", "from ..objective import loss"),
        ("compute", "from tah2.model.hf import LoopedForCausalLM"),
        ("train", "from tah2 import convert"),
    ],
)
def test_an_upward_import_is_noticed(room: str, line: str):
    modules = imported_modules(line, f"tah2.{room}")
    assert [module for module in modules if complaint(room, module)] == list(modules) != []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("cli", "from tah2.config.strict import ConfigError"),
        ("cli", "from tah2 import __version__"),
        ("engine", "from tah2 import visibility"),
        ("model", "from .attention import attend"),
        ("compute", "from tah2.model.kinds import LOOP_KINDS"),
    ],
)
def test_a_downward_import_is_fine(room: str, line: str):
    modules = imported_modules(line, f"tah2.{room}")
    assert [module for module in modules if complaint(room, module)] == []
    assert modules


def test_files_are_short():
    long = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files("*.py")}
    assert {name: lines for name, lines in long.items() if lines > LONGEST_FILE} == {}


def test_no_file_names_a_machine_or_a_registry():
    found = []
    for path in files("*"):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for pattern in (MACHINE_PATHS, REGISTRY_HOSTS):
            found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert project["version"] == tah2.__version__
    assert f"\nversion: {tah2.__version__}\n" in citation
