"""Hostile programs stay in their room: nothing outside changes, nothing is read, nothing is left running."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tah2.config.strict import ConfigError
from tah2.evals.sandbox import Limits, Sandbox, SandboxError, sandbox_report
from tah2.evals.sandbox.client import Worker

SHORT = Limits(wall_seconds=5, cpu_seconds=2, memory_mb=256)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux namespaces")


@pytest.fixture(scope="module")
def room() -> Iterator[Sandbox]:
    if not sandbox_report()["sandboxed"]:
        pytest.skip(sandbox_report()["reason"])
    with Sandbox() as sandbox:
        yield sandbox


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


def test_a_program_reads_and_writes(room: Sandbox):
    outcome = room.run_program("print(int(input()) ** 2)", stdin="12\n")
    assert (outcome.ending, outcome.output, outcome.reply) == ("done", "144\n", {"status": 0})


def test_its_exit_status_and_errors_are_told(room: Sandbox):
    assert room.run_program("raise SystemExit(3)").reply == {"status": 3}
    failed = room.run_program("1 / 0")
    assert failed.reply == {"status": 1}
    assert "ZeroDivisionError" in failed.output


def test_an_infinite_loop_is_stopped_by_its_processor_time(room: Sandbox):
    outcome = room.run_program("while True: pass", limits=Limits(wall_seconds=20, cpu_seconds=1))
    assert outcome.ending == "time"
    assert outcome.seconds < 10


def test_a_sleeper_is_stopped_by_the_clock(room: Sandbox):
    outcome = room.run_program("import time; time.sleep(60)", limits=Limits(wall_seconds=0.5))
    assert outcome.ending == "time"
    assert outcome.seconds < 5


def test_infinite_output_is_cut(room: Sandbox):
    source = "import os\nwhile True: os.write(1, b'x' * 65536)"
    outcome = room.run_program(source, limits=Limits(output_bytes=100_000))
    assert outcome.ending == "output"
    assert len(outcome.output) == 100_000


def test_memory_ends_where_the_limit_is(room: Sandbox):
    outcome = room.run_program("x = bytearray(1 << 30)", limits=SHORT)
    assert outcome.reply == {"status": 1}
    assert "MemoryError" in outcome.output


def test_many_processes_share_one_memory_limit(room: Sandbox):
    source = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hog = bytearray(100 << 20)
        hog[::4096] = b"x" * len(hog[::4096])
        time.sleep(30)
time.sleep(30)
"""
    assert room.run_program(source, limits=SHORT).ending == "memory"


def test_hidden_memory_counts_too(room: Sandbox):
    outcome = room.run_program("import os; os.memfd_create('x')")
    assert "PermissionError" in outcome.output
    outcome = room.run_program("open('/dev/shm/x', 'wb').write(bytes(70 << 20))", limits=Limits(file_mb=8))
    assert outcome.reply == {"status": 1}


def test_a_fork_bomb_fizzles(room: Sandbox):
    source = """
import os, time
born = 0
while True:
    try:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except BlockingIOError:
                    time.sleep(60)
        born += 1
    except BlockingIOError:
        print("no more", flush=True)
        time.sleep(60)
"""
    started = time.monotonic()
    outcome = room.run_program(source, limits=Limits(wall_seconds=1.5, processes=32))
    assert outcome.ending == "time"
    assert "no more" in outcome.output
    assert time.monotonic() - started < 8
    assert room.run_program("print('still serving')").output == "still serving\n"


@pytest.mark.parametrize(
    "leave",
    [
        "os.setsid()",
        "os.setsid(); pid = os.fork(); pid and os._exit(0)",
        "os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); [os.close(n) for n in range(10)]",
    ],
)
def test_a_daemon_does_not_outlive_its_program(room: Sandbox, leave: str):
    mark = f"leftover{os.getpid()}"
    source = f"""
import ctypes, os, signal, time
def close(number):
    try:
        os.close(number)
    except OSError:
        pass
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"{mark[:15]}", 0, 0, 0)
    {leave.replace("os.close(n)", "close(n)")}
    time.sleep(60)
    os._exit(0)
time.sleep(0.3)
print("done", flush=True)
"""
    outcome = room.run_program(source, limits=SHORT)
    assert outcome.output == "done\n"
    assert outcome.seconds < 3
    assert processes_with(mark[:15]) == []


def test_files_outside_cannot_be_seen_or_deleted(room: Sandbox, tmp_path: Path):
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
    outcome = room.run_program(source, limits=SHORT)
    assert outcome.output.split() == ["FileNotFoundError", "OSError", "OSError"]
    assert keep.read_text() == "precious"
    assert Path(os.__file__).exists()


def test_secrets_cannot_be_read(room: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "do-not-tell")
    secret = tmp_path / "token"
    secret.write_text("do-not-tell")
    secret.chmod(0o644)
    source = f"""
import glob, os
names = ["/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/1/mem", {str(secret)!r}, {str(Path.home())!r} + "/.ssh"]
for name in names + glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(name, "rb").read() if os.path.isfile(name) else os.listdir(name))
    except OSError as error:
        print(name, type(error).__name__)
print(sorted(os.environ))
print(os.getuid(), os.getgroups())
"""
    with Sandbox() as sandbox:  # its worker starts while the key is in the environment
        outcome = sandbox.run_program(source, limits=SHORT)
    assert outcome.ending == "done"
    assert "do-not-tell" not in outcome.output
    assert "OPENAI_API_KEY" not in outcome.output
    assert f"{secret} FileNotFoundError" in outcome.output
    assert "/etc/shadow FileNotFoundError" in outcome.output
    assert "/proc/1/environ PermissionError" in outcome.output
    if os.getuid() == 0:
        assert outcome.output.strip().endswith("65534 []")


def test_there_is_no_network(room: Sandbox):
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
        outcome = room.run_program(source, limits=SHORT)
    assert outcome.output.split() == ["PermissionError"] * 4 + ["b'local'"]


def test_other_processes_cannot_be_reached(room: Sandbox):
    source = f"""
import os, signal
for pid in ({os.getpid()}, {os.getppid()}, 1):
    try:
        os.kill(pid, signal.SIGKILL)
        print("sent")
    except OSError as error:
        print(type(error).__name__)
print(len([name for name in os.listdir("/proc") if name.isdigit()]))
"""
    outcome = room.run_program(source, limits=SHORT)
    assert outcome.ending == "done"  # the signal to process 1 of the room is ignored
    assert outcome.output.split()[:2] == ["ProcessLookupError"] * 2
    assert outcome.output.split()[-1] == "2"


def test_no_privilege_can_be_had(room: Sandbox):
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
    outcome = room.run_program(source, limits=SHORT)
    assert outcome.output.split() == ["-1", "-1", "-1", "refused", "refused", "refused"]


def test_files_are_few_and_small_and_gone_afterwards(room: Sandbox):
    big = room.run_program("open('x', 'wb').write(bytes(20 << 20))", limits=Limits(file_mb=4))
    assert big.reply == {"status": 1}
    many = room.run_program("for n in range(10**6): open(str(n), 'w').close()")
    assert "No space left" in many.output
    assert room.run_program("import os; open('/tmp/x', 'w'); print(os.listdir('/tmp'))").output == "['x']\n"
    assert room.run_program("import os; print(os.listdir('/tmp'))").output == "[]\n"


def test_open_files_are_limited(room: Sandbox):
    outcome = room.run_program("f = [open('/dev/null') for _ in range(1000)]", limits=Limits(open_files=50))
    assert "Too many open files" in outcome.output


def test_a_verdict_cannot_be_written_by_a_forked_program(room: Sandbox):
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
    outcome = room.run_program(source, limits=SHORT)
    assert (outcome.ending, outcome.reply) == ("done", {"status": 0})


def test_a_program_that_vanishes_has_crashed(room: Sandbox):
    outcome = room.run_program("import os; os._exit(0)")
    assert (outcome.ending, outcome.reply) == ("crashed", None)
    outcome = room.run_program("import os; os.abort()")
    assert (outcome.ending, outcome.status) == ("crashed", 134)


def test_workers_serve_at_once_and_apart(room: Sandbox):
    from concurrent.futures import ThreadPoolExecutor

    with Sandbox(workers=2) as sandbox, ThreadPoolExecutor(4) as pool:
        started = time.monotonic()
        runs = [pool.submit(sandbox.run_program, f"import time; time.sleep(0.5); print({n})") for n in range(4)]
        assert [run.result().output for run in runs] == [f"{n}\n" for n in range(4)]
        assert time.monotonic() - started < 1.9


def test_a_dead_worker_is_replaced():
    worker = Worker((), (), jailed=sandbox_report()["sandboxed"])
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
    from tah2.evals.sandbox import client

    report = {"sandboxed": False, "reason": "unshare: Operation not permitted", "protections": {}}
    monkeypatch.setattr(client, "sandbox_report", lambda: report)
    with pytest.raises(SandboxError, match=r"unshare.*TAH2_ALLOW_UNSANDBOXED=1"):
        Sandbox()
    monkeypatch.setenv("TAH2_ALLOW_UNSANDBOXED", "1")
    with Sandbox() as sandbox:
        assert sandbox.run_program("print('at your own risk')").output == "at your own risk\n"


def test_the_report_names_what_is_in_force():
    report = sandbox_report()
    assert set(report) >= {"sandboxed", "reason", "protections"}
    assert report["sandboxed"] == (bool(report["protections"]) and all(report["protections"].values()))


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match="memory_mb must be positive"):
        Limits(memory_mb=0)
