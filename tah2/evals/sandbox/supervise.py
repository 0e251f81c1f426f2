"""One run, from fork to verdict: the supervisor outside the room, process 1 inside, and the program below it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tah2.evals.sandbox import fence, jail, kernel
from tah2.evals.sandbox.jail import JailPlan
from tah2.evals.sandbox.limits import Limits, Outcome

Harness = Callable[[Any], Any]
FAILED = "the harness raised"
VERDICT_BYTES = 1 << 22
LOOK_EVERY = 0.05
"""Seconds between two looks at the memory of all processes together."""
PATIENCE = 0.5
"""Seconds that output may arrive, and processes may leave by themselves, after the program has ended."""


@dataclass
class Pipe:
    """Both ends, closed as often as anybody likes."""

    ends: list[int] = field(default_factory=lambda: list(os.pipe()))

    @property
    def reading(self) -> int:
        return self.ends[0]

    @property
    def writing(self) -> int:
        return self.ends[1]

    def close(self, *which: int) -> None:
        for place in which or (0, 1):
            if self.ends[place] >= 0:
                os.close(self.ends[place])
                self.ends[place] = -1


@dataclass(frozen=True)
class Run:
    harness: Harness
    request: Any
    limits: Limits
    keep_output: bool


@dataclass
class Channels:
    verdict: Pipe = field(default_factory=Pipe)
    output: Pipe = field(default_factory=Pipe)
    entered: Pipe = field(default_factory=Pipe)
    mapped: Pipe = field(default_factory=Pipe)

    def pipes(self) -> tuple[Pipe, ...]:
        return self.verdict, self.output, self.entered, self.mapped

    def close(self) -> None:
        for pipe in self.pipes():
            pipe.close()

    def close_all_else(self) -> None:
        """Whatever else this process has inherited, such as the supervisor's line to its own caller."""
        before = 2
        for kept in sorted(end for pipe in self.pipes() for end in pipe.ends if end > 2):
            os.closerange(before + 1, kept)
            before = kept
        os.closerange(before + 1, os.sysconf("SC_OPEN_MAX"))


def run_jailed(run: Run, plan: JailPlan, abandoned: Callable[[], bool] = lambda: False) -> Outcome:
    """Run as `plan` says; ends early when `abandoned`."""
    if plan.kind != "room":
        shutil.rmtree(plan.scratch, ignore_errors=True)
        plan.scratch.mkdir()
        plan.scratch.chmod(0o777)
    started = time.monotonic()
    channels = Channels()
    porter = os.fork()
    if porter == 0:
        _never_return(lambda: _porter(run, plan, channels))
    try:
        channels.verdict.close(1)
        channels.output.close(1)
        channels.entered.close(1)
        channels.mapped.close(0)
        _admit(porter, plan, channels)
        ending, verdict, output = _watch(porter, run.limits, channels, abandoned)
        status = _end(porter, PATIENCE if ending == "done" else 0.0)
    except BaseException:
        _end(porter, 0.0)
        raise
    finally:
        channels.close()
    seconds = time.monotonic() - started
    text = output.decode("utf-8", errors="replace")
    if ending == "done" and not verdict:
        ending = "time" if status == 128 + signal.SIGXCPU else "crashed"
    reply = json.loads(verdict) if ending == "done" else None
    if isinstance(reply, dict) and FAILED in reply:
        ending, reply = "failed", reply[FAILED]
    return Outcome(ending, reply, text, seconds, status)  # type: ignore[arg-type]


def _admit(porter: int, plan: JailPlan, channels: Channels) -> None:
    """Give the porter its user names once it stands in its own user namespace."""
    if plan.kind == "room" and os.read(channels.entered.reading, 1):
        with contextlib.suppress(OSError):  # without names it cannot build the room, and says so
            jail.user_maps(porter)
    channels.mapped.close(1)


def _watch(porter: int, limits: Limits, channels: Channels, abandoned: Callable[[], bool]) -> tuple[str, bytes, bytes]:
    """Collect verdict and output until the program ends, or a ceiling is reached."""
    deadline = time.monotonic() + limits.wall_seconds
    gathered = {channels.verdict.reading: bytearray(), channels.output.reading: bytearray()}
    ceilings = {channels.verdict.reading: VERDICT_BYTES, channels.output.reading: limits.output_bytes}
    open_ends = set(gathered)
    own = _memory(os.getpid())
    ending, ended = "done", False
    next_look = time.monotonic() + LOOK_EVERY
    while open_ends:
        now = time.monotonic()
        if now >= deadline or abandoned():
            ending = "done" if ended else "time"  # whoever still holds the output open is a leftover
            break
        if now >= next_look:
            next_look = now + LOOK_EVERY
            if sum(max(0, _memory(pid) - own) for pid in descendants(porter)) > limits.memory_mb << 20:
                ending = "memory"
                break
        ready, _, _ = select.select(list(open_ends), [], [], max(0.0, min(LOOK_EVERY, deadline - now)))
        for end in ready:
            chunk = os.read(end, 1 << 16)
            gathered[end] += chunk
            if not chunk:
                open_ends.discard(end)
                if end == channels.verdict.reading:
                    deadline, ended = min(deadline, time.monotonic() + PATIENCE), True
        if any(len(gathered[end]) > ceilings[end] for end in gathered):
            ending = "output"
            break
    output = bytes(gathered[channels.output.reading][: limits.output_bytes])
    return ending, bytes(gathered[channels.verdict.reading]), output


def _end(porter: int, patience: float) -> int:
    """Stop the porter and everything below it, if they have not left after `patience` seconds; its exit status."""
    until = time.monotonic() + patience
    done, status = os.waitpid(porter, os.WNOHANG)
    while not done and time.monotonic() < until:
        time.sleep(0.001)
        done, status = os.waitpid(porter, os.WNOHANG)
    if not done:
        for pid in list(descendants(porter)):
            _kill(pid)
        _kill(porter)
        _, status = os.waitpid(porter, 0)
    for leftover in _orphans():
        _kill(leftover)
    return os.waitstatus_to_exitcode(status)


def _orphans() -> Iterator[int]:
    """What has outlived its parents comes to the supervisor, which adopts; stopped first, so that nothing is born."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = list(descendants(os.getpid()))
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        yield from left
        time.sleep(0.001)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Children of `pid`, their children, and so on, as far as /proc tells."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def _memory(pid: int) -> int:
    """Bytes that `pid` holds in memory."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _never_return(work: Callable[[], int]) -> None:
    """A forked child must not run what its parent would: it leaves here, whatever happens."""
    status = 70
    try:
        status = work()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _porter(run: Run, plan: JailPlan, channels: Channels) -> int:
    """Enter new namespaces, where the plan asks for a room, and start process 1."""
    os.setsid()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    channels.verdict.close(0)
    channels.output.close(0)
    channels.close_all_else()
    os.dup2(channels.output.writing, 2)
    others = jail.processes_of(jail.NOBODY if os.geteuid() == 0 else os.geteuid())
    if plan.kind == "room" and _enter_namespaces(channels) and jail.counts_by_namespace():
        others = 0
    first = os.fork()
    if first == 0:
        _never_return(lambda: _first(run, plan, channels, others))
    channels.close()
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _enter_namespaces(channels: Channels) -> bool:
    """Whether there was a user namespace too; root alone can do without, where the machine has none."""
    flags = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    try:
        kernel.unshare(kernel.NEWUSER | flags)
    except OSError:
        if os.geteuid() != 0:
            raise
        kernel.unshare(flags)
        return False
    os.write(channels.entered.writing, b"1")
    channels.mapped.close(1)
    os.read(channels.mapped.reading, 1)
    return True


def _first(run: Run, plan: JailPlan, channels: Channels, others: int) -> int:
    """Process 1 of the room: builds it, starts the program, and takes everything along when it ends."""
    channels.entered.close()
    channels.mapped.close()
    place = jail.TEMPORARY if plan.kind == "room" else str(plan.scratch)
    if plan.kind == "room":
        jail.build_room(plan, run.limits)
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["HOME"] = place
    os.chdir(place)
    jail.become_nobody(plan)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    program = os.fork()
    if program == 0:
        _never_return(lambda: _program(run, plan, channels, others))
    channels.close()
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _program(run: Run, plan: JailPlan, channels: Channels, others: int) -> int:
    """The harness. What it forks inherits neither the verdict's pipe nor a way to reach this process.

    `others`: processes of the same user that the limit on processes would count along.
    """
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    quiet = os.open("/dev/null", os.O_RDWR)
    os.dup2(quiet, 0)
    for end in (1, 2):
        os.dup2(channels.output.writing if run.keep_output else quiet, end)
    channels.output.close()
    os.register_at_fork(after_in_child=lambda: channels.verdict.close(1))
    jail.limit_resources(run.limits, others)
    if plan.kind == "fence":
        fence.raise_fence(plan.readable, (plan.scratch,))
    kernel.filter_system_calls()
    try:
        reply = json.dumps(run.harness(run.request))
    except Exception as error:
        reply = json.dumps({FAILED: f"{type(error).__name__}: {error}"[:2000]})
    _write_all(channels.verdict.writing, reply.encode())
    return 0


def _write_all(end: int, content: bytes) -> None:
    while content:
        content = content[os.write(end, content) :]
