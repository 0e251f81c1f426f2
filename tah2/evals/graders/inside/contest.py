"""LiveCodeBench's format: programs that read standard input, or methods that are called, against expected outputs.

A program runs in a process of its own for every test; the expected output stays in this one, which compares.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import signal
import sys
import time
import zlib
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tah2.evals.graders.inside.source import whole_program
from tah2.evals.sandbox.limits import BUSY

SECONDS = 6.0
"""For one test, as LiveCodeBench allows."""
STAR_IMPORTS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
PLAIN_IMPORTS = (*STAR_IMPORTS, "typing")
OUTPUT_BYTES = 1 << 24


class Unfit(pickle.Unpickler):
    """Reads plain values only: nothing that a pickle can name is found."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"private tests name {module}.{name}, which plain tests never do")


def private_tests(stored: str | list[dict[str, str]] | None) -> list[dict[str, str]]:
    """As JSON, or as base64 of zlib of a pickled JSON text, which is how the original file holds them."""
    if not stored:
        return []
    if isinstance(stored, list):
        return stored
    try:
        found = json.loads(stored)
    except ValueError:
        found = json.loads(Unfit(io.BytesIO(zlib.decompress(base64.b64decode(stored)))).load())
    return [{"input": test["input"], "output": test["output"]} for test in found]


def check(request: dict[str, Any]) -> dict[str, Any]:
    """All tests up to the first that fails. Every result is a bool, so `passed` counts what it seems to count."""
    program = whole_program(request["response"])
    tests = [*request["public_test_cases"], *private_tests(request["private_test_cases"])]
    run = method_test if request["fn_name"] else stdin_test
    for number, test in enumerate(tests):
        failure = run(program, test, request["fn_name"])
        if failure:
            return {"passed": number, "tests": len(tests), "failure": failure}
    return {"passed": len(tests), "tests": len(tests), "failure": ""}


def stdin_test(program: str, test: dict[str, str], _: None) -> str:
    """Empty if the program prints what the test expects, else why not."""

    def work() -> None:
        exec(compile(program, "solution.py", "exec"), namespace("__main__"))

    ending, output = run_apart(work, test["input"])
    if ending:
        return ending
    return "" if same_output(output, test["output"]) else "wrong answer"


def method_test(program: str, test: dict[str, str], name: str) -> str:
    """Empty if the method returns what the test expects, else why not; tuples count as lists, as in JSON."""

    def work() -> None:
        names = namespace("solution")
        exec(compile(program, "solution.py", "exec"), names)
        owner = names["Solution"]() if "Solution" in names else None
        method = getattr(owner, name) if owner is not None else names[name]
        result = method(*[json.loads(line) for line in test["input"].split("\n")])
        print(json.dumps({"result": result}, default=plain), file=sys.__stdout__)

    ending, output = run_apart(work, "", separate_prints=True)
    if ending:
        return ending
    try:
        returned = json.loads(output)["result"]
    except (ValueError, KeyError, TypeError):
        return "wrong answer"
    return "" if returned == json.loads(test["output"]) else "wrong answer"


def plain(value: Any) -> Any:
    """A number of a numerical library as the plain number that it equals."""
    return value.item()


def namespace(name: str) -> dict[str, Any]:
    """What LiveCodeBench imports for every program, because contest sites do."""
    names: dict[str, Any] = {"__name__": name}
    lines = [f"from {module} import *" for module in (*STAR_IMPORTS, "builtins", "typing")]
    exec("\n".join([*lines, *(f"import {module}" for module in PLAIN_IMPORTS)]), names)
    return names


def run_apart(work: Callable[[], None], stdin: str, separate_prints: bool = False) -> tuple[str, str]:
    """Fork, feed, wait: ("", output), or (why it failed, "")."""
    with open("input", "w+b") as given, open("output", "w+b") as taken:
        given.write(stdin.encode())
        given.seek(0)
        child = os.fork()
        if child == 0:
            _become(work, given.fileno(), taken.fileno(), separate_prints)
        ending = _await(child)
        if ending:
            return ending, ""
        taken.seek(0)
        return "", taken.read(OUTPUT_BYTES).decode("utf-8", errors="replace")


def _become(work: Callable[[], None], given: int, taken: int, separate_prints: bool) -> None:
    """In the child: standard streams are the files, and nothing of the grader goes on."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(given, 0)
        os.dup2(taken, 1)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        if separate_prints:
            sys.stdout = io.StringIO()
        sys.setrecursionlimit(50_000)
        work()
        status = 0
    except SystemExit as leaving:
        status = 0 if leaving.code in (None, 0) else 1
    except BaseException:
        status = 1
    finally:
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
        os._exit(status)


def _await(child: int) -> str:
    """Why the child failed, or nothing; it is gone afterwards, with its group."""
    started = time.monotonic()
    pause = 0.001
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or out_of_time(child, time.monotonic() - started):
            break
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    if not done:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "time limit exceeded"
    return "runtime error" if status else ""


def out_of_time(child: int, clock: float) -> bool:
    """A program that works has so much processor time, however busy the machine; one that waits goes by the clock."""
    if clock < SECONDS:
        return False
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # there is no /proc
        return True
    worked = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return fields[0] == "S" or worked >= SECONDS or clock > BUSY * SECONDS


def same_output(output: str, expected: str) -> bool:
    """Line by line without outer white space; where lines differ, as decimals: exact, unlike binary floats."""
    given, wanted = stripped_lines(output), stripped_lines(expected)
    return len(given) == len(wanted) and all(map(same_line, given, wanted))


def stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def same_line(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    try:
        return [Decimal(word) for word in given.split()] == [Decimal(word) for word in wanted.split()]
    except InvalidOperation:
        return False
