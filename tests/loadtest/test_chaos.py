"""Faults are carried out on processes of our own that look like Serve's."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from loadtest.chaos.faults import Chaos, Fault, parse_chaos, schedule
from loadtest.chaos.server_processes import ServerInstance, ServerProcess, instance_at
from loadtest.errors import ScenarioError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

SESSION = "session_2026-11-21_09-20-42_368133_1"
# A raylet with two replicas, one of which has an engine, a proxy that listens, and a stranger that
# looks like a replica but belongs to another session.
TREE = """
import subprocess, sys
log, port, python = sys.argv[1:]
sleep = "import time; time.sleep(60)"
listen = f"import socket; s = socket.create_server(('127.0.0.1', {port})); {sleep}"
command = [python, "-c", sleep, "-m", "engine.process.main"]
engine = f"import subprocess; subprocess.Popen({command!r}).wait()"

def child(title, code):
    return subprocess.Popen([title, "-c", code], executable=python)

children = [
    child("ray::ServeController", sleep),
    child("ray::ServeReplica:manta:router", sleep),
    child("ray::ServeReplica:manta:engine-cpu", engine),
    child("ray::ServeReplica:manta:engine-cpu", sleep),
    child("ray::ProxyActor", listen),
]
sys.stdin.read()
for c in children:
    c.kill()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cluster() -> Iterator[tuple[ServerInstance, subprocess.Popen[bytes]]]:
    port = free_port()
    raylet = subprocess.Popen(
        ["/opt/raylet", "-c", TREE, f"--log_dir={SESSION}/logs", str(port), sys.executable],
        executable=sys.executable,
        stdin=subprocess.PIPE,
    )
    stranger = subprocess.Popen(
        ["ray::ServeReplica:manta:engine-cpu", "-c", "import time; time.sleep(60)"],
        executable=sys.executable,
    )
    started: list[int] = []
    try:
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline
            try:
                instance = instance_at(f"http://127.0.0.1:{port}/v1")
                started = [p.pid for p in instance.processes()]
                if instance.find("engine") and len(instance.find("replica")) == 2:
                    break
            except ScenarioError:  # it does not listen yet
                pass
            time.sleep(0.05)
        yield instance, stranger
    finally:
        assert raylet.stdin is not None
        raylet.stdin.close()
        raylet.wait()
        stranger.kill()
        stranger.wait()
        for pid in started:  # the engine stand-in outlives its killed parent
            if "engine.process.main" in cmdline(pid):
                os.kill(pid, signal.SIGKILL)


def cmdline(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_only_processes_of_the_tested_instance_are_found(
    cluster: tuple[ServerInstance, subprocess.Popen[bytes]],
) -> None:
    """A fault test that kills by name ends the neighbour's cluster as well."""
    instance, stranger = cluster
    assert instance.session == SESSION
    counts = {name: len(instance.find(name)) for name in ("router", "controller", "proxy", "node")}
    assert counts == {"router": 1, "controller": 1, "proxy": 1, "node": 1}
    assert len(instance.find("engine")) == 1
    assert instance.find("gcs") == []
    assert stranger.pid not in [p.pid for p in instance.processes()]
    assert os.getpid() not in [p.pid for p in instance.processes()]


def test_kill_strikes_on_time_and_marks_it(
    cluster: tuple[ServerInstance, subprocess.Popen[bytes]],
) -> None:
    """A mark that is off by a second makes the gap beside it look like another fault's."""
    instance, stranger = cluster
    before = {p.pid for p in instance.find("replica")}
    chaos = Chaos(parse_chaos("kill-replica@200ms"), finder=instance)
    chaos.start(time.monotonic())
    time.sleep(0.6)
    marks = chaos.stop()
    after = {p.pid for p in instance.find("replica")}
    (victim,) = before - after
    assert [m.what for m in marks] == [f"kill replica (pid {victim})"]
    assert 0.2 <= marks[0].t < 0.5
    assert stranger.poll() is None


def test_pause_freezes_and_lets_go(cluster: tuple[ServerInstance, subprocess.Popen[bytes]]) -> None:
    """A process left frozen after the run holds its clients until somebody finds out."""
    instance, _ = cluster
    (router,) = instance.find("router")
    chaos = Chaos(parse_chaos("pause-router@0s for 300ms"), finder=instance)
    chaos.start(time.monotonic())
    time.sleep(0.15)
    assert state(router.pid) == "T"
    time.sleep(0.4)
    assert state(router.pid) in "SR"
    assert [m.what for m in chaos.stop()] == [
        f"pause router (pid {router.pid})",
        f"router goes on (pid {router.pid})",
    ]
    chaos = Chaos(parse_chaos("pause-router@0s for 60s"), finder=instance)
    chaos.start(time.monotonic())
    time.sleep(0.15)
    assert state(router.pid) == "T"
    chaos.stop()  # the run ended during the pause
    time.sleep(0.05)
    assert state(router.pid) in "SR"


class Respawning:
    """A finder whose victims come back as new processes a moment after their death."""

    def __init__(self) -> None:
        self.children = [self.spawn(), self.spawn()]
        self.died: float | None = None

    def spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def find(self, target: str) -> list[ServerProcess]:
        from loadtest.chaos.server_processes import _read

        dead = [c for c in self.children if c.poll() is not None]
        if dead and self.died is None:
            self.died = time.monotonic()
        if dead and self.died is not None and time.monotonic() - self.died > 0.3:
            self.children = [c for c in self.children if c not in dead]
            self.children += [self.spawn() for _ in dead]
            self.died = None
        _reads = [_read(c.pid) for c in self.children if c.poll() is None]
        return [p for p in _reads if p is not None]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def test_marks_tell_when_a_process_came_back() -> None:
    """Without the return, a reader of the timeline cannot tell recovery from spare capacity."""
    finder = Respawning()
    try:
        chaos = Chaos(parse_chaos("kill-replica@0s x2"), finder=finder)
        chaos.start(time.monotonic())
        time.sleep(1.2)
        what = [m.what for m in chaos.stop()]
    finally:
        finder.close()
    assert [w.split(" (")[0] for w in what[:2]] == ["kill replica", "kill replica"]
    assert what[2].startswith("replica process back after 0.") and len(what) == 3


def test_server_started_again_is_found() -> None:
    """A killed server without Ray is back, and neither marked so nor killed a second time."""
    port = free_port()
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    servers = []

    def start() -> None:
        servers.append(subprocess.Popen([sys.executable, "-c", code]))
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                return
            time.sleep(0.05)

    try:
        start()
        instance = instance_at(f"http://127.0.0.1:{port}")
        assert [p.pid for p in instance.find("server")] == [servers[0].pid]
        servers[0].kill()
        servers[0].wait()
        assert instance.find("server") == []
        start()
        assert [p.pid for p in instance.find("server")] == [servers[1].pid]
    finally:
        for server in servers:
            server.kill()
            server.wait()


def test_pid_used_again_is_spared() -> None:
    """Between the look and the signal a pid can pass to a process that is nobody's business."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert not ServerProcess(child.pid, os.getpid(), 1, "an older one").send(signal.SIGKILL)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_parse() -> None:
    """A misread time or rate tests something else than the report says."""
    assert parse_chaos("kill-replica@30s,kill-engine every 20s") == [
        Fault("kill", "replica", 30.0),
        Fault("kill", "engine", 20.0, every=20.0),
    ]
    assert parse_chaos(["pause-router@1.5m for 250ms x2"]) == [
        Fault("pause", "router", 90.0, hold=0.25, count=2)
    ]
    assert parse_chaos("kill-node every 10s from 5s to 26s") == [
        Fault("kill", "node", 5.0, every=10.0, end=26.0)
    ]
    assert parse_chaos("") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kill-replica", "for example"),
        ("kill-replica@30", "for example"),
        ("kill-replicas@30s", "no target 'replicas'"),
        ("burn-replica@30s", "no action 'burn'"),
        ("pause-replica@30s", "needs 'for'"),
        ("kill-replica@30s for 3s", "needs 'for'"),
        ("kill-replica every 0s", "too often"),
        ("kill-replica@1s x0", "count"),
    ],
)
def test_bad_faults_are_refused(text: str, told: str) -> None:
    """A fault that is silently not injected looks like a server that survives it."""
    with pytest.raises(ScenarioError, match=told):
        parse_chaos(text)


def test_schedule_repeats_until_the_end() -> None:
    """Repeated faults must not drift: each is counted from the start, not from the last."""
    faults = parse_chaos("kill-engine every 100ms, kill-router@350ms")
    due = list(itertools.islice(schedule(faults), 5))
    assert [round(t, 6) for t, _ in due] == [0.1, 0.2, 0.3, 0.35, 0.4]
    assert due[3][1].target == "router"


def test_fault_without_victim_ends_before_the_run() -> None:
    """Ten minutes of load for a report in which nothing was injected."""

    class Empty:
        def find(self, target: str) -> list[ServerProcess]:
            return []

    with pytest.raises(ScenarioError, match="no replica process"):
        Chaos(parse_chaos("kill-replica@1s"), finder=Empty())
    with pytest.raises(ScenarioError, match="listens on port"):
        instance_at(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ScenarioError, match="another"):
        instance_at("http://192.0.2.77:80")
