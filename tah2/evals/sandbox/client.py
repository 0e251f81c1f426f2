"""What the rest of the package uses: a few sandboxed workers, asked one thing at a time each."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from tah2.config.strict import ConfigError
from tah2.evals.sandbox import kernel
from tah2.evals.sandbox.limits import Kind, Limits, Outcome, SandboxError
from tah2.evals.sandbox.report import PROTECTIONS, REQUIRED
from tah2.evals.sandbox.zygote import receive, send

ALLOW_VARIABLE = "TAH2_ALLOW_UNSANDBOXED"
OVERTIME = 15.0
"""Seconds past a run's own limit after which its worker is taken for dead."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""All that a program sees of the environment; nothing of the caller's."""


class Worker:
    """One zygote process; started on first use, and again after it died."""

    def __init__(self, preload: Sequence[str], path: Sequence[str], kind: Kind) -> None:
        self._setup = {"preload": list(preload), "path": [*path, *sys.path], "show": list(path), "kind": kind}
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, harness: str, request: Any, limits: Limits, keep_output: bool = False) -> Outcome:
        process = self._running()
        job = {"harness": harness, "request": request, "limits": asdict(limits), "keep_output": keep_output}
        watchdog = threading.Timer(limits.wall_seconds + OVERTIME, self._kill)
        watchdog.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            send(process.stdin, job)
            reply = receive(process.stdout)
        except OSError:
            reply = None
        finally:
            watchdog.cancel()
        if reply is None:
            self.close()
            return Outcome("crashed", output="the sandbox's worker died")
        return Outcome(**reply)

    def close(self) -> None:
        """Ask it to leave, and make it leave."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._folder = tempfile.mkdtemp(prefix="tah2-worker-")
        command = [sys.executable, "-I", "-c", START, json.dumps(self._setup)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**ENVIRONMENT, "TMPDIR": self._folder},
            cwd=self._folder,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        greeting = receive(self._process.stdout)
        if greeting is None or "failed" in greeting:
            self.close()
            reason = (greeting or {}).get("failed", "it died at once")
            raise ConfigError(f"A grader's worker cannot start: {reason}.")
        return self._process


START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from tah2.evals.sandbox.zygote import main; main()"
)


class Sandbox:
    """Up to `workers` zygotes behind one thread-safe `call`, started when needed. Use it as a context manager.

    Raises SandboxError where the machine cannot keep a program from the network and from other files, unless
    `allow_unsandboxed` (or the environment variable TAH2_ALLOW_UNSANDBOXED=1) accepts that.
    """

    def __init__(
        self,
        workers: int = 1,
        preload: Sequence[str] = (),
        path: Sequence[str] = (),
        allow_unsandboxed: bool | None = None,
    ) -> None:
        report = sandbox_report()
        if not kernel.supported():
            raise SandboxError("Model-written code runs on Linux (x86_64, aarch64) alone; grade in a container.")
        allowed = os.environ.get(ALLOW_VARIABLE) == "1" if allow_unsandboxed is None else allow_unsandboxed
        if not report["sandboxed"] and not allowed:
            raise SandboxError(
                f"This machine gives no sandbox for model-written code ({report['reason']}); grade on one that permits "
                f"user namespaces, or accept the risk with {ALLOW_VARIABLE}=1."
            )
        self._workers = [Worker(preload, path, report["kind"]) for _ in range(workers)]
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._free.put(worker)

    def call(self, harness: str, request: Any, limits: Limits | None = None, keep_output: bool = False) -> Outcome:
        """Run `harness` (`module:function`) on `request` inside; both it and its reply are plain JSON values."""
        worker = self._free.get()
        try:
            return worker.call(harness, request, limits or Limits(), keep_output)
        finally:
            self._free.put(worker)

    def run_program(self, source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a whole Python program; `output` is what it wrote, `reply["status"]` its exit status."""
        request = {"source": source, "stdin": stdin}
        return self.call("tah2.evals.sandbox.programs:run_source", request, limits, keep_output=True)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def sandbox_report() -> dict[str, Any]:
    """Which protections are in force on this machine, as a probe inside the sandbox found them.

    `kind` is the strongest that holds: "room" (namespaces), "fence" (Landlock), or "none", which runs nothing unless
    that is allowed; `reason` says what keeps the room from being had.
    """
    if not kernel.supported():
        return {"sandboxed": False, "kind": "none", "reason": f"no sandbox for {sys.platform}", "protections": {}}
    room = probed("room")
    if room["sandboxed"]:
        return room
    fence = probed("fence")
    if fence["sandboxed"]:
        return {**fence, "reason": f"no namespaces: {room['reason']}"}
    return {**fence, "kind": "none", "reason": f"{room['reason']}; {fence['reason']}"}


def probed(kind: Kind) -> dict[str, Any]:
    """What a program kept in `kind` can do that it must not."""
    nothing: dict[str, Any] = {"sandboxed": False, "kind": kind, "protections": {}}
    worker = Worker((), (), kind)
    try:
        with tempfile.NamedTemporaryFile(prefix="tah2-probe-") as secret:
            os.chmod(secret.name, 0o644)
            request = {"parent": os.getpid(), "secret": secret.name}
            outcome = worker.call("tah2.evals.sandbox.report:probe", request, Limits(), keep_output=True)
    except ConfigError as error:
        return {**nothing, "reason": str(error).rstrip(".")}
    finally:
        worker.close()
    if outcome.ending != "done":
        reason = outcome.output.strip().split("\n")[-1] or f"{outcome.ending} {outcome.reply or ''}".strip()
        return {**nothing, "reason": reason}
    held = {name: bool(outcome.reply[name]) for name in PROTECTIONS}
    lacking = [name for name in REQUIRED if not held[name]]
    reason = f"lacking: {', '.join(lacking)}" if lacking else ""
    return {
        "sandboxed": not lacking,
        "kind": kind,
        "reason": reason,
        "protections": held,
        "user": outcome.reply["user"],
    }
