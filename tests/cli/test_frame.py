"""The frame of the command line: instant answers, one-sentence errors, and commands that exist."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tah2
from tah2.cli import frame
from tah2.config.strict import ConfigError

ROOT = Path(__file__).resolve().parents[2]
INSTANT_SECONDS = 0.3


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Install `main` as the command `probe`."""

    def install(main) -> None:
        module = types.ModuleType("probe_command")
        module.main = main
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(frame.COMMANDS, "probe", frame.Command("probe_command", "a command of this test"))
        monkeypatch.delenv("TAH2_DEBUG", raising=False)

    return install


def raising(error: BaseException):
    def main(argv: list[str]) -> int:
        raise error

    return main


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["convrt"], []])
def test_answers_at_once_without_heavy_imports(words: list[str]):
    program = (
        "import sys, time; from tah2.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'numpy', 'tyro', 'yaml'} & set(sys.modules); "
        "print(code, heavy or 'none', time.process_time())"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True, cwd=ROOT
        )
        _, heavy, spent = done.stdout.splitlines()[-1].split()
        assert heavy == "none"
        seconds.append(float(spent))
    assert min(seconds) < INSTANT_SECONDS


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert frame.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, entry in frame.COMMANDS.items():
        assert f"  {name}" in text
        assert entry.help in text


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]):
    assert frame.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tah2 {tah2.__version__}\n"


def test_no_command_prints_usage_and_fails(capsys: pytest.CaptureFixture[str]):
    assert frame.main([]) == frame.USAGE_ERROR
    assert capsys.readouterr().err.startswith("usage: tah2")


@pytest.mark.parametrize("name", list(frame.COMMANDS))
def test_listed_commands_import_and_have_help(name: str, capsys: pytest.CaptureFixture[str]):
    assert callable(importlib.import_module(frame.COMMANDS[name].module).main)
    try:
        code = frame.main([name, "--help"])
    except SystemExit as stop:
        code = stop.code
    assert code in (0, None)
    assert name in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(command, capsys: pytest.CaptureFixture[str]):
    command(lambda argv: 0)
    assert frame.main(["prbe"]) == frame.USAGE_ERROR
    assert capsys.readouterr().err == "tah2: Unknown command 'prbe'; did you mean 'probe'?\n"


def test_a_command_gets_its_words_and_gives_its_code(command):
    seen = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    command(main)
    assert frame.main(["probe", "a", "--b", "c"]) == 7
    assert seen == [["a", "--b", "c"]]


def test_a_command_that_returns_nothing_succeeded(command):
    command(lambda argv: None)
    assert frame.main(["probe"]) == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("Unknown key 'lop'; did you mean 'loop'?"), "tah2: Unknown key 'lop'; did you mean 'loop'?"),
        (ValueError("Two\n  lines of\n\ntext."), "tah2: Two lines of text."),
        (ValueError(), "tah2: ValueError"),
        (FileNotFoundError(2, "No such file or directory", "a.yaml"), "tah2: a.yaml: no such file or directory."),
        (OSError("nowhere is not a local folder"), "tah2: nowhere is not a local folder"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(command, capsys: pytest.CaptureFixture[str], error: Exception, line: str):
    command(raising(error))
    assert frame.main(["probe"]) == frame.USAGE_ERROR
    output = capsys.readouterr()
    assert output.err == line + "\n"
    assert output.out == ""


def test_debug_shows_the_traceback(command, monkeypatch: pytest.MonkeyPatch):
    command(raising(ConfigError("wrong")))
    monkeypatch.setenv("TAH2_DEBUG", "1")
    with pytest.raises(ConfigError, match="wrong"):
        frame.main(["probe"])


def test_a_bug_keeps_its_traceback(command):
    command(raising(KeyError("a defect of ours, not a mistake of the user")))
    with pytest.raises(KeyError):
        frame.main(["probe"])


def test_an_interrupt_is_quiet(command, capsys: pytest.CaptureFixture[str]):
    command(raising(KeyboardInterrupt()))
    assert frame.main(["probe"]) == frame.INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_early_causes_no_noise():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "tah2", "--help"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert done.returncode == frame.BROKEN_PIPE
    assert done.stderr == b""
