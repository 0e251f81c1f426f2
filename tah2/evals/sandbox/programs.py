"""Harnesses of the sandbox itself: they run inside, and may be named like any grader's."""

from __future__ import annotations

import io
import sys
import traceback
from typing import Any


def run_source(request: dict[str, str]) -> dict[str, Any]:
    """Run `source` as a program with `stdin`; its exit status as Python would give it. Output goes where it goes."""
    sys.stdin = io.StringIO(request.get("stdin", ""))
    sys.argv = ["program.py"]
    status: Any = 0
    try:
        exec(compile(request["source"], "program.py", "exec"), {"__name__": "__main__"})
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return {"status": status}
