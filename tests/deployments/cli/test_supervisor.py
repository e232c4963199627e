"""Stops, losses and leftovers of `manta serve`, with processes that only carry Ray's names."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.serving import processes
from deployments.cli.serving.supervisor import Signals
from deployments.cli.serving.time_limit import within
from tests.deployments.on_ray.live import ROOT

pytestmark = pytest.mark.timeout(60)


class Serving:
    """A `manta serve` without Ray. pids: of what it has started, by name; the last of each."""

    def __init__(self, folder: Path, **told: Any) -> None:
        command = [sys.executable, "-m", "tests.deployments.cli.fake_serving", str(folder)]
        self.process = subprocess.Popen(
            [*command, json.dumps(told)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self.serves = told["until"] in ("serving", "beat")
        self.pids: dict[str, int] = {}
        self.all: set[int] = set()
        self.output = ""

    def until(self, text: str) -> None:
        assert self.process.stdout is not None
        while text not in self.output:
            line = self.process.stdout.readline()
            assert line, self.output
            self._take_line(line)

    def is_there(self) -> None:
        """The driver has said what it had to, and the server has heard it."""
        self.until("there")
        if self.serves:
            self.until("Serving")

    def _take_line(self, line: str) -> None:
        self.output += line
        name, _, pid = line.strip().partition(" ")
        if pid.isdecimal():
            self.pids[name] = int(pid)
            self.all.add(int(pid))

    def ends(self, seconds: float) -> int:
        """The exit code. Asserts that it ends in time and leaves nothing."""
        rest, _ = self.process.communicate(timeout=seconds)
        for line in rest.splitlines(keepends=True):
            self._take_line(line)
        left = [pid for pid in self.all if processes.read(pid) is not None]
        assert not left, (left, self.output)
        assert self.all, self.output
        return self.process.returncode


@contextlib.contextmanager
def serving(folder: Path, **told: Any) -> Iterator[Serving]:
    server = Serving(folder, **told)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        for pid in server.all:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("until", "number", "code", "closes"),
    [
        ("", signal.SIGTERM, 0, False),
        ("model", signal.SIGINT, 130, False),
        ("ray", signal.SIGTERM, 0, False),
        ("serving", signal.SIGTERM, 0, True),
        ("serving", signal.SIGINT, 130, False),
        ("serving", signal.SIGHUP, 129, False),
    ],
)
def test_a_signal_to_the_whole_group(
    tmp_path: Path, until: str, number: int, code: int, closes: bool
) -> None:
    """What `timeout`, a supervisor and a closed terminal send ended Ray before us: we waited a
    minute for it, were ended by it with code 1, and haproxy went on listening."""
    with serving(tmp_path, until=until) as server:
        server.is_there()
        os.killpg(server.process.pid, number)
        os.killpg(server.process.pid, number)  # as `timeout` does: it is no second one
        assert server.ends(5) == code, server.output
        assert ("close 60.0" in server.output) == closes
        assert "Traceback" not in server.output


def test_ctrl_c_without_end(tmp_path: Path) -> None:
    """One in the last moments ended the process by the signal, with another code."""
    with serving(tmp_path, until="ray") as server:
        server.is_there()
        while server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGINT)
            time.sleep(0.005)
        assert server.ends(5) == 130, server.output
        assert "Traceback" not in server.output


def test_a_supervisor_that_signals_every_process(tmp_path: Path) -> None:
    """A cgroup's SIGTERM (systemd's default) ends Ray with us, which is no loss."""
    with serving(tmp_path, until="beat") as server:
        server.is_there()
        for pid in (*server.all, server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert server.ends(5) == 0, server.output
        assert "starting again" not in server.output


@pytest.mark.parametrize("hurry", [False, True])
def test_a_stop_that_ray_does_not_answer(tmp_path: Path, hurry: bool) -> None:
    """SIGTERM waited for ever in a call to Ray; a second one had to be known of."""
    with serving(
        tmp_path, until="beat", stays=True, limits={"drain_seconds": 60.0 * hurry}
    ) as server:
        server.is_there()
        server.process.terminate()
        if hurry:
            server.until("close")
            time.sleep(0.2)
            server.process.terminate()
        assert server.ends(5) == 0, server.output


@pytest.mark.parametrize(("program", "name"), [("raylet", "raylet"), ("gcs_server", "GCS")])
def test_a_lost_node_is_started_again(tmp_path: Path, program: str, name: str) -> None:
    """After the raylet's end the server stayed for ever, silent, and healed nothing."""
    with serving(tmp_path, until="beat", limits={"restarts": 1}) as server:
        server.is_there()
        os.kill(server.pids[program], signal.SIGKILL)
        server.until(f"the {name} of Manta's Ray has ended; starting again (1 of 1 in an hour)")
        server.output = ""
        server.is_there()
        os.kill(server.pids["raylet"], signal.SIGKILL)
        assert server.ends(5) == 1, server.output
        assert "limits.restarts is 1" in server.output


def test_a_ray_that_is_silent_is_lost(tmp_path: Path) -> None:
    """A GCS that stands still answers nothing, and nobody noticed."""
    with serving(tmp_path, until="serving", silent=0.5, limits={"restarts": 0}) as server:
        assert server.ends(8) == 1, server.output
        assert "Ray has not answered" in server.output


def test_what_a_killed_server_leaves_is_known(tmp_path: Path) -> None:
    """haproxy outlived a killed server and sent requests to whoever got its backends' ports. The
    next server finds it, and takes nobody else's processes for its own."""
    with serving(tmp_path, until="beat") as server:
        server.is_there()
        assert not set(processes.leftovers()) & server.all, "its server lives"
        server.process.kill()
        server.process.wait()
        assert {server.pids["raylet"], server.pids["plain"]} <= set(processes.leftovers())
        # Its processes have children of their own, which would outlive the test.
        by = f"{server.process.pid}."
        assert processes.kill(
            lambda: {
                pid
                for pid in processes.leftovers()
                if pid in server.all or processes.marked([pid]).get(pid, "").startswith(by)
            }
        )
        assert processes.read(server.pids["raylet"]) is None
    assert os.getpid() not in processes.leftovers()


def _started(mark: str) -> subprocess.Popen[bytes]:
    """A process of that mark, once /proc shows it, which is after Popen has returned."""
    process = subprocess.Popen(["sleep", "100"], env={processes.MARK: mark})
    while processes.marked([process.pid]) != {process.pid: mark}:
        time.sleep(0.001)
    return process


@pytest.fixture
def marked() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:

        def start(mark: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(_started(mark))
            stack.callback(process.kill)
            return process

        yield start


Start = Callable[[str], subprocess.Popen[bytes]]


def test_a_container_seen_from_its_host(marked: Start) -> None:
    """Pids of another namespace mean other processes here: those of a server in a container looked
    like the leftovers of one that has ended."""
    other = marked("1.1.4711")
    ours = marked(f"1.1.{processes._namespace()}")
    leftover = processes.leftovers()
    assert ours.pid in leftover and other.pid not in leftover


def test_signals_that_come_twice() -> None:
    """The second of two that were sent at once ended all without letting requests end."""
    signals = Signals()
    signals.handle(signal.SIGTERM)
    signals.handle(signal.SIGTERM)
    assert (signals.first, signals.hurry, signals.exit_code) == (signal.SIGTERM, False, 0)
    time.sleep(0.15)
    signals.handle(signal.SIGINT)
    assert (signals.hurry, signals.exit_code) == (True, 0)


def test_a_call_with_a_time_limit() -> None:
    """Ray's calls may never return; what they return or raise is what one gets otherwise."""
    assert within(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer for 0\.1 s"):
        within(0.1, lambda: time.sleep(2))
    assert time.monotonic() - began < 1
