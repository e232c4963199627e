"""Kills the head node of a small cluster with all its processes, and starts it again by the
commands of cluster.yaml.

    python -m tests.deployments.on_ray.head_restart --out report.json

The cluster has a head node without CPUs and a worker node, both on this machine. Router, engine and
the worker's proxy are on the worker, so that requests go on without a head. Prints a report.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from deployments.app import as_config, assemble, deploy, serve_config
from deployments.cli.serving.processes import adopt_orphans, descendants
from tests.deployments.on_ray.fake_nodes import ROOT, stop_all
from tests.deployments.on_ray.serve_cluster import fake_engine, free_port, tiny_model

NAME = "headless"
WITHOUT_S = 15.0  # seconds without a head, more than Ray takes to notice its loss
RESTART_S = 90.0


def build(arguments: dict[str, Any]) -> Any:
    """Return the application that Serve imports."""
    return assemble(as_config(arguments["config"]), fake_engine)


# `ray start --head` refuses while a node of that head runs on the same machine. Here the worker
# does, unlike on a cloud.
_RAY = """#!{python}
import ray._private.services as services
from ray.scripts.scripts import main

services.find_gcs_addresses = lambda: set()
main()
"""


class Cluster:
    """A cluster whose home folder has a token and this checkout, as `ray up` leaves it on a
    node."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port, self.edge, self.router = free_port(), free_port(), free_port()
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
        (home / "manta").symlink_to(ROOT)
        (home / "bin").mkdir()
        ray = home / "bin" / "ray"
        ray.write_text(_RAY.format(python=sys.executable))
        ray.chmod(0o755)
        self.commands = yaml.safe_load((ROOT / "cluster.yaml").read_text())
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "HOME": str(home),
            "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_HEAD_IP": "127.0.0.1",
            # HAProxy would use this port of the router on every node.
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(self.router),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(self.router + 1),
        }

    def head(self) -> set[int]:
        """Start the head, and return the pids of its processes."""
        command = self.commands["head_start_ray_commands"][-1]
        command = re.sub(r"--autoscaling-config=\S+", "--num-cpus=0", command)
        return self._start(f"{command} --include-dashboard=false --temp-dir={self.home}/r")

    def worker(self) -> set[int]:
        command = self.commands["worker_start_ray_commands"][-1].partition("&&")[0]
        return self._start(f"{command} --num-cpus=2")

    def _start(self, command: str) -> set[int]:
        before = set(descendants(os.getpid()))
        # Use Serve's own proxy instead of HAProxy.
        command = command.replace("ray start", "RAY_SERVE_ENABLE_HA_PROXY=0 ray start", 1)
        command = command.replace(":6379", f":{self.port}").replace("=6379", f"={self.port}")
        command += " --node-ip-address=127.0.0.1 --disable-usage-stats"
        command += " --object-store-memory=104857600"
        with open(self.home / "start.log", "a") as log:
            subprocess.run(
                ["sh", "-c", command],
                env=self.environment,
                stdout=log,
                stderr=log,
                check=True,
                timeout=90,
            )
        return set(descendants(os.getpid())) - before

    def driver(self, what: str, timeout: float = 90) -> str:
        """Run `drive` in a process with the cluster's environment, and return its output."""
        environment = {**self.environment, "RAY_AUTH_MODE": "token"}
        command = [sys.executable, "-m", "tests.deployments.on_ray.head_restart", "--driver", what]
        command += [
            "--address",
            f"127.0.0.1:{self.port}",
            "--home",
            str(self.home),
            "--http",
            str(self.edge),
        ]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""

    def answers(self, port: int, seconds: float) -> float:
        """Wait until the service answers, and return the seconds that it took."""
        began = time.monotonic()
        while (said := self.ask(port)).startswith("failed"):
            assert time.monotonic() < began + seconds, said
            time.sleep(0.2)
        return round(time.monotonic() - began, 1)

    def ask(self, port: int) -> str:
        """Send a request; return the answer's text, or "failed" with the reason."""
        body = {"model": NAME, "prompt": "hello", "max_tokens": 5}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return str(json.loads(answer.read())["choices"][0]["text"])
        except (urllib.error.URLError, OSError) as error:
            return f"failed: {error}"


def drive(what: str, address: str, http: int, model: Path) -> None:
    """Deploy the application, or print its status.

    what: "deploy" or "status".
    """
    import ray
    from ray import serve

    ray.init(address=address, log_to_driver=False)
    if what == "deploy":
        config = {
            "model": str(model),
            "served_name": NAME,
            "app_name": NAME,
            "engine": {"device": "cpu"},
            "pools": {"cpu": {"replicas": 1, "num_cpus": 0.5}},
            "router": {"replicas": 1, "num_cpus": 0.5},
            "http": {"proxy": "serve"},
        }
        schema = serve_config(config)
        options = {"host": "127.0.0.1", "port": http}
        schema |= {"proxy_location": "EveryNode", "http_options": options}
        schema["applications"][0]["import_path"] = "tests.deployments.on_ray.head_restart:build"
        deploy(schema)
    status = serve.status().applications.get(NAME)
    print(status.status.value if status else "none")


def run(home: Path, without: float) -> dict[str, Any]:
    cluster = Cluster(home)
    tiny_model(home / "tiny")
    report: dict[str, Any] = {"failed": []}
    head = cluster.head()
    cluster.worker()
    cluster.driver("deploy")
    report["ready_s"] = cluster.answers(cluster.edge, 90)
    workers = _tree(set(descendants(os.getpid())) - _tree(head))
    for pid in _tree(head):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    report["asked"] = 0
    while time.monotonic() < began + without:
        said = cluster.ask(cluster.router)
        report["asked"] += 1
        report["failed"] += [said] if said.startswith("failed") else []
        time.sleep(0.2)
    cluster.head()
    report["back_s"] = cluster.answers(cluster.edge, RESTART_S)
    report["status"] = cluster.driver("status")
    # The engine, the router and their raylet must not have been restarted.
    report["ended"] = sorted(pid for pid in workers if not Path(f"/proc/{pid}").exists())
    return report


def _tree(roots: set[int]) -> set[int]:
    """Return the pids of these processes and all their descendants."""
    return roots.union(*(descendants(pid) for pid in roots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--without", type=float, default=WITHOUT_S, help="seconds without a head")
    parser.add_argument("--driver")
    parser.add_argument("--address")
    parser.add_argument("--http", type=int)
    parser.add_argument("--home", type=Path)
    options = parser.parse_args()
    if options.driver:
        drive(options.driver, options.address, options.http, options.home / "tiny")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    # Processes that Ray leaves behind become children of this process.
    adopt_orphans()
    home = Path(tempfile.mkdtemp(prefix="h"))  # short, because Ray's socket paths are limited
    try:
        report = run(home, options.without)
    finally:
        stop_all()
        shutil.rmtree(home, ignore_errors=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
