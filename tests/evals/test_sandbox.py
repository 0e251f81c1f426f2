"""Hostile programs stay in their room: nothing outside changes, nothing is read, nothing is left running."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tah2.config.strict import ConfigError
from tah2.evals.sandbox import Limits, Sandbox, SandboxError, client, sandbox_report
from tah2.evals.sandbox.client import Worker, probed
from tah2.evals.sandbox.limits import Kind
from tah2.evals.sandbox.report import REQUIRED

SHORT = Limits(wall_seconds=5, cpu_seconds=2, memory_mb=256)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux namespaces")


def kept_in(kind: Kind) -> Iterator[Sandbox]:
    """A sandbox of this kind, on a machine that has it."""
    report = probed(kind)
    if not report["sandboxed"]:
        pytest.skip(report["reason"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "sandbox_report", lambda: report)
        sandbox = Sandbox(workers=2)
    with sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def room() -> Iterator[Sandbox]:
    yield from kept_in("room")


@pytest.fixture(scope="module", params=["room", "fence"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Both kinds: what holds for all tests that take it is promised on every machine that runs programs at all."""
    yield from kept_in(request.param)


def processes_with(mark: str) -> list[int]:
    """Processes whose command line or name holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "cmdline").read_bytes().decode(errors="replace") + (entry / "comm").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_program_reads_and_writes(sandbox: Sandbox):
    outcome = sandbox.run_program("print(int(input()) ** 2)", stdin="12\n")
    assert (outcome.ending, outcome.output, outcome.reply) == ("done", "144\n", {"status": 0})


def test_its_exit_status_and_errors_are_told(sandbox: Sandbox):
    assert sandbox.run_program("raise SystemExit(3)").reply == {"status": 3}
    failed = sandbox.run_program("1 / 0")
    assert failed.reply == {"status": 1}
    assert "ZeroDivisionError" in failed.output


def test_an_infinite_loop_is_stopped_by_its_processor_time(sandbox: Sandbox):
    outcome = sandbox.run_program("while True: pass", limits=Limits(wall_seconds=60, cpu_seconds=1))
    assert outcome.ending == "time"
    assert outcome.seconds < 60


def test_a_sleeper_is_stopped_by_the_clock(sandbox: Sandbox):
    outcome = sandbox.run_program("import time; time.sleep(60)", limits=Limits(wall_seconds=0.5))
    assert outcome.ending == "time"
    assert outcome.seconds < 5


def test_infinite_output_is_cut(sandbox: Sandbox):
    source = "import os\nwhile True: os.write(1, b'x' * 65536)"
    outcome = sandbox.run_program(source, limits=Limits(output_bytes=100_000))
    assert outcome.ending == "output"
    assert len(outcome.output) == 100_000


def test_memory_ends_where_the_limit_is(sandbox: Sandbox):
    outcome = sandbox.run_program("x = bytearray(1 << 30)", limits=SHORT)
    assert outcome.reply == {"status": 1}
    assert "MemoryError" in outcome.output


def test_many_processes_share_one_memory_limit(sandbox: Sandbox):
    source = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hog = bytearray(100 << 20)
        hog[::4096] = b"x" * len(hog[::4096])
        time.sleep(30)
time.sleep(30)
"""
    assert sandbox.run_program(source, limits=SHORT).ending == "memory"


def test_hidden_memory_counts_too(sandbox: Sandbox):
    outcome = sandbox.run_program("import os; os.memfd_create('x')")
    assert "PermissionError" in outcome.output
    outcome = sandbox.run_program("open('/dev/shm/x', 'wb').write(bytes(70 << 20))", limits=Limits(file_mb=8))
    assert outcome.reply == {"status": 1}


def test_a_fork_bomb_fizzles(sandbox: Sandbox):
    mark = f"bomb{os.getpid()}"
    source = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"{mark}", 0, 0, 0)
while True:
    try:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except BlockingIOError:
                    time.sleep(60)
    except BlockingIOError:
        print("no more", flush=True)
        break
"""
    outcome = sandbox.run_program(source, limits=Limits(wall_seconds=30, processes=32))
    assert (outcome.ending, outcome.output) == ("done", "no more\n")
    assert processes_with(mark) == []
    assert sandbox.run_program("print('still serving')").output == "still serving\n"


@pytest.mark.parametrize(
    "leave",
    [
        "os.setsid()",
        "os.setsid(); pid = os.fork(); pid and os._exit(0)",
        "os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); [os.close(n) for n in range(10)]",
    ],
)
def test_a_daemon_does_not_outlive_its_program(sandbox: Sandbox, leave: str):
    mark = f"left{os.getpid()}"
    source = f"""
import ctypes, os, signal, time
def close(number):
    try:
        os.close(number)
    except OSError:
        pass
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"{mark}", 0, 0, 0)
    {leave.replace("os.close(n)", "close(n)")}
    time.sleep(60)
    os._exit(0)
time.sleep(0.3)
print("done", flush=True)
"""
    outcome = sandbox.run_program(source, limits=Limits(wall_seconds=30))
    assert outcome.output == "done\n"
    assert outcome.seconds < 20
    assert processes_with(mark) == []


def test_files_outside_cannot_be_seen_or_deleted(sandbox: Sandbox, tmp_path: Path):
    keep = tmp_path / "keep"
    keep.write_text("precious")
    keep.chmod(0o666)
    tmp_path.chmod(0o777)
    source = f"""
import json, os, shutil, sys
shutil.rmtree(os.path.dirname(json.__file__), ignore_errors=True)
shutil.rmtree("/etc", ignore_errors=True)
for name in ({str(keep)!r}, sys.executable, os.__file__):
    try:
        os.remove(name)
    except OSError as error:
        print(type(error).__name__)
"""
    outcome = sandbox.run_program(source, limits=SHORT)
    assert len(outcome.output.split()) == 3
    assert keep.read_text() == "precious"
    assert Path(os.__file__).exists()


def test_secrets_cannot_be_read(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "do-not-tell")
    secret = tmp_path / "token"
    secret.write_text("do-not-tell")
    secret.chmod(0o644)
    source = f"""
import glob, os
names = ["/etc/shadow", "/etc/passwd", "/proc/1/environ", {str(secret)!r}, {str(Path.home() / ".ssh")!r}]
for name in names + glob.glob("/proc/[0-9]*/environ"):
    try:
        print(os.listdir(name) if os.path.isdir(name) else open(name, "rb").read())
    except OSError as error:
        print(name, type(error).__name__)
print(sorted(os.environ))
print(os.getuid(), os.getgroups())
"""
    sandbox.close()  # the next worker starts while the key is in the environment
    outcome = sandbox.run_program(source, limits=SHORT)
    assert outcome.ending == "done"
    assert "do-not-tell" not in outcome.output
    assert "OPENAI_API_KEY" not in outcome.output
    for name in ("/etc/shadow", "/etc/passwd", "/proc/1/environ", secret):
        assert any(f"{name} {error}" in outcome.output for error in ("FileNotFoundError", "PermissionError"))
    if os.getuid() == 0:
        assert outcome.output.strip().endswith("65534 []")


def test_there_is_no_network(sandbox: Sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
import socket
for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        with socket.socket(kind, socket.SOCK_STREAM if kind != 16 else socket.SOCK_RAW) as end:
            end.connect(("127.0.0.1", {port}))
        print("connected")
    except OSError as error:
        print(type(error).__name__)
a, b = socket.socketpair()
a.send(b"local"); print(b.recv(5))
"""
        outcome = sandbox.run_program(source, limits=SHORT)
    assert outcome.output.split() == ["PermissionError"] * 4 + ["b'local'"]


def test_other_processes_cannot_be_reached(sandbox: Sandbox):
    source = f"""
import os, signal
for pid in ({os.getpid()}, {os.getppid()}, os.getppid(), 1):
    try:
        os.kill(pid, 0)
        print("reached", pid)
    except OSError as error:
        print("out of reach")
"""
    outcome = sandbox.run_program(source, limits=SHORT)
    reached = [line for line in outcome.output.splitlines() if line.startswith("reached")]
    assert outcome.ending == "done"
    assert [line for line in reached if line != "reached 1"] == []


def test_other_processes_cannot_be_seen(room: Sandbox):
    source = """
import os, signal
os.kill(1, signal.SIGKILL)
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
"""
    assert room.run_program(source, limits=SHORT).output == "[1, 2]\n", "process 1 of the room ignores the signal"


def test_no_privilege_can_be_had(sandbox: Sandbox):
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), libc.ptrace(0, 0, 0, 0))
for attempt in (lambda: os.setuid(0), lambda: os.chroot("/tmp"), lambda: os.sethostname("x")):
    try:
        attempt(); print("allowed")
    except (OSError, AttributeError) as error:
        print("refused")
"""
    outcome = sandbox.run_program(source, limits=SHORT)
    assert outcome.output.split() == ["-1", "-1", "-1", "refused", "refused", "refused"]


def test_files_are_few_and_small_and_gone_afterwards(room: Sandbox):
    big = room.run_program("open('x', 'wb').write(bytes(20 << 20))", limits=Limits(file_mb=4))
    assert big.reply == {"status": 1}
    many = room.run_program("for n in range(10**6): open(str(n), 'w').close()")
    assert "No space left" in many.output
    fresh = room.run_program("import os; print(os.listdir('/tmp'))").output  # an interpreter that lives there shows
    assert "'x'" in room.run_program("import os; open('/tmp/x', 'w'); print(os.listdir('/tmp'))").output
    assert room.run_program("import os; print(os.listdir('/tmp'))").output == fresh
    assert "'x'" not in fresh


def test_open_files_are_limited(sandbox: Sandbox):
    outcome = sandbox.run_program("f = [open('/dev/null') for _ in range(1000)]", limits=Limits(open_files=50))
    assert "Too many open files" in outcome.output


def test_a_verdict_cannot_be_written_by_a_forked_program(sandbox: Sandbox):
    source = """
import os
if os.fork() == 0:
    for number in range(3, 200):
        try:
            os.write(number, b'{"status": 42}')
        except OSError:
            pass
    os._exit(0)
os.wait()
"""
    outcome = sandbox.run_program(source, limits=SHORT)
    assert (outcome.ending, outcome.reply) == ("done", {"status": 0})


def test_a_program_that_vanishes_has_crashed(sandbox: Sandbox):
    outcome = sandbox.run_program("import os; os._exit(0)")
    assert (outcome.ending, outcome.reply) == ("crashed", None)
    outcome = sandbox.run_program("import os; os.abort()")
    assert (outcome.ending, outcome.status) == ("crashed", 134)


def test_workers_serve_at_once_and_apart(room: Sandbox):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        runs = [pool.submit(room.run_program, f"import time; time.sleep(2); print({n})") for n in range(2)]
        assert [run.result().output for run in runs] == [f"{n}\n" for n in range(2)]
        assert time.monotonic() - started < 3.9


def test_a_dead_worker_is_replaced():
    worker = Worker((), (), sandbox_report()["kind"])
    request = {"source": "print(1)"}
    try:
        assert worker.call("tah2.evals.sandbox.programs:run_source", request, SHORT, True).output == "1\n"
        worker._kill()
        ended = worker.call("tah2.evals.sandbox.programs:run_source", request, SHORT, True)
        again = worker.call("tah2.evals.sandbox.programs:run_source", request, SHORT, True)
        assert "1\n" in (ended.output, again.output)
        assert again.output == "1\n"
    finally:
        worker.close()


def test_without_protections_nothing_runs_unless_allowed(monkeypatch: pytest.MonkeyPatch):
    report = {"sandboxed": False, "kind": "none", "reason": "unshare: Operation not permitted", "protections": {}}
    monkeypatch.setattr(client, "sandbox_report", lambda: report)
    with pytest.raises(SandboxError, match=r"unshare.*TAH2_ALLOW_UNSANDBOXED=1"):
        Sandbox()
    monkeypatch.setenv("TAH2_ALLOW_UNSANDBOXED", "1")
    with Sandbox() as unsafe:
        assert unsafe.run_program("print('at your own risk')").output == "at your own risk\n"


def test_the_report_names_what_is_in_force():
    report = sandbox_report()
    assert set(report) >= {"sandboxed", "reason", "protections"}
    assert report["sandboxed"] == (report["kind"] != "none")
    assert report["sandboxed"] == all(report["protections"].get(name) for name in REQUIRED)
    unkept = probed("none")
    assert not unkept["sandboxed"]
    assert "own files" in unkept["reason"]
    assert not unkept["protections"]["own files"]


def test_the_fence_stands_in_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch):
    def found(kind: Kind) -> dict[str, Any]:
        return {"sandboxed": kind == "fence", "kind": kind, "reason": f"why not {kind}", "protections": {}}

    monkeypatch.setattr(client, "probed", found)
    report = client.sandbox_report.__wrapped__()
    assert (report["kind"], report["reason"]) == ("fence", "no namespaces: why not room")
    monkeypatch.setattr(client, "probed", lambda kind: {**found(kind), "sandboxed": False})
    report = client.sandbox_report.__wrapped__()
    assert (report["kind"], report["sandboxed"]) == ("none", False)


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match="memory_mb must be positive"):
        Limits(memory_mb=0)
