"""Ray itself is lost under `manta serve`: the GCS, or an agent, which takes the raylet along."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployments.cli.serving.processes import descendants, leftovers, read, table
from tests.deployments.cli.test_cli import stopped
from tests.deployments.on_ray.live import ROOT
from tests.faults.test_terminate import ready, served
from tests.test_docs import run

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(200)]

NOTICED = 10.0  # seconds
START = 60.0  # seconds: 25 on two quiet cores


def manta(*arguments: str, **environment: str) -> tuple[int, str, float]:
    """Run a command of `manta`, and return its exit code, its output and its seconds."""
    began = time.monotonic()
    by_name = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", *arguments],
        cwd=ROOT,
        env=by_name | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def below(process: "subprocess.Popen[str]", title: str) -> int:
    """Return the pid of a server's only descendant with `title` in its command line."""
    items = [
        pid
        for pid in descendants(process.pid)
        if title in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    ]
    assert len(items) == 1, items
    return items[0]


def test_a_lost_node_is_started_again_and_then_given_up(tmp_path: Path) -> None:
    """The server stayed after either, for ever: nothing healed, or nothing answered, a SIGTERM
    hung, and no supervisor was told. Beside it, in the same start: the variables that it tells
    other jobs to set do not let one in; `manta status` without the token that it needs tried for
    22 s and said so in 20 lines of Ray's."""
    with served(tmp_path, "haproxy", restarts=1) as (process, port):
        assert process.stdout is not None
        line = next(line for line in process.stdout if "manta status" in line)
        address = line.split()[-1]
        line = next(line for line in process.stdout if "Other Ray jobs" in line)
        variables = dict(re.findall(r"(\w+)=([^\s,]+)", line))
        assert run((ROOT / "examples" / "ray_job.py").read_text("utf-8"), **variables).strip()
        code, output, seconds = manta("status", "-1", "--address", address)
        assert code == 1 and seconds < 10 and len(output.splitlines()) == 1, (seconds, output)
        assert "RAY_AUTH_MODE=token" in output and "Traceback" not in output
        code, output, _ = manta("status", "-1", "--address", address, RAY_AUTH_MODE="token")
        assert code == 0 and "RUNNING" in output, output

        first = set(descendants(process.pid))
        os.kill(below(process, "gcs_server"), signal.SIGKILL)
        began = time.monotonic()
        line = next(line for line in process.stdout if "again" in line)
        assert line == "the GCS of Manta's Ray has ended; starting again (1 of 1 in an hour)\n"
        print(f"noticed after {time.monotonic() - began:.1f} s")
        assert time.monotonic() < began + NOTICED
        line = next(line for line in process.stdout if "Serving" in line)
        print(f"serves again after {time.monotonic() - began:.1f} s")
        assert ready(port) and time.monotonic() < began + START
        assert not [table()[pid] for pid in first if read(pid) and pid in table()]

        ours = descendants(process.pid)
        os.kill(below(process, "ray::DashboardAgent"), signal.SIGKILL)
        began = time.monotonic()
        assert process.wait(NOTICED) == 1
        print(f"given up after {time.monotonic() - began:.1f} s")
        assert "limits.restarts is 1" in process.stdout.read()
        assert len(ours) > 8 and not [pid for pid in ours if read(pid) is not None]


def test_the_next_server_ends_what_a_killed_one_left(tmp_path: Path) -> None:
    """haproxy and workers of a server that was killed by SIGKILL held its port, and haproxy sent
    requests to whoever got the ports of its backends."""
    with served(tmp_path, "haproxy") as (process, port):
        ours = descendants(process.pid)
        process.kill()
        process.wait()
        time.sleep(1)  # much of it ends by itself
        left = [text for pid in ours if (text := read(pid)) is not None]
        known = leftovers()
        print(f"left behind: {left}")
        assert all(item.pid in known or read(item.pid) is None for item in left), known
        code, output, _ = manta("serve", str(tmp_path / "none.gguf"), "--address", "local")
        assert code == 2, output
        # The next one, which is stopped itself while it starts.
        stopped(tmp_path / "manta.yaml", port, "Starting Ray", signal.SIGTERM, 1)
        assert not [pid for pid in ours if read(pid) is not None]
        assert not ready(port)
