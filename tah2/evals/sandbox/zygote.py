"""A worker process that imports a grader's libraries once and forks one jailed child per run.

It speaks over its standard input and output: length-prefixed JSON, one request at a time. Its own environment is
scrubbed and it holds nothing but benchmark data, so there is nothing in its memory for a child to find.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import struct
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tah2.evals.sandbox import jail, kernel
from tah2.evals.sandbox.jail import JailPlan
from tah2.evals.sandbox.limits import Limits, Outcome
from tah2.evals.sandbox.supervise import Harness, Run, run_jailed

LENGTH = struct.Struct("=Q")


def send(stream: IO[bytes], message: Any) -> None:
    content = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(content)) + content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message, or None where the other side has gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    content = stream.read(length)
    return json.loads(content) if len(content) == length else None


def harness_named(name: str) -> Harness:
    """`package.module:function`."""
    module, _, function = name.partition(":")
    found: Harness = getattr(importlib.import_module(module), function)
    return found


def main() -> None:
    """argv: one JSON object with import path, modules to import ahead, folders to show inside, and the kind."""
    setup = json.loads(sys.argv[1])
    sys.path[:] = setup["path"]
    requests, replies = _own_streams()
    try:
        for name in setup["preload"]:
            importlib.import_module(name)
    except Exception as error:
        send(replies, {"failed": f"{type(error).__name__}: {error}"})
        return
    send(replies, {"ready": True})
    gc.collect()
    gc.freeze()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="tah2-room-", ignore_cleanup_errors=True) as root:
        for folder in (Path(root).parent, Path(root)):
            folder.chmod(0o711)
        plan = JailPlan(setup["kind"], Path(root), jail.python_folders(setup["show"]))
        while (job := receive(requests)) is not None:
            send(replies, asdict(_serve(job, plan, requests)))


def _serve(job: dict[str, Any], plan: JailPlan, requests: IO[bytes]) -> Outcome:
    run = Run(harness_named(job["harness"]), job["request"], Limits(**job["limits"]), job["keep_output"])
    return run_jailed(run, plan, lambda: _hung_up(requests))


def _hung_up(stream: IO[bytes]) -> bool:
    """Whether whoever asked has gone: nobody writes to this worker while it is busy, so readable means closed."""
    ready, _, _ = select.select([stream], [], [], 0)
    return bool(ready)


def _own_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output under new numbers, so that nothing that a library prints can mingle."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)
    return requests, replies


if __name__ == "__main__":
    main()
