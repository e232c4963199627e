"""A Ray cluster whose autoscaler starts and ends fake nodes: processes of this machine that claim
to have a GPU.

It needs a separate process, all of whose descendants `stop_all` ends."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray._private import auto_init_hook
from ray._private.authentication_test_utils import reset_auth_token_state

from deployments.cli.serving.processes import adopt_orphans, descendants
from tests.deployments.on_ray.serve_cluster import free_port

ROOT = Path(__file__).parents[3]
_HEAD = "f" * 51 + "00000"  # id of the head node; the ids of further nodes count up from it
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
_EMPTY: dict[str, Any] = {
    "auth": {},
    "docker": {},
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
}


@contextlib.contextmanager
def autoscaling_ray(types: dict[str, dict[str, Any]], idle_seconds: float = 6.0) -> Iterator[str]:
    """Run a Ray cluster whose autoscaler adds nodes; yield its address.

    The head node has no CPU, so every actor or task with a CPU needs a new node.
    types: the fields of available_node_types, by name.
    """
    folder = tempfile.mkdtemp(prefix="r")  # short: Ray puts sockets in it
    address = f"127.0.0.1:{free_port()}"
    common = {"node_config": {}, "min_workers": 0}
    config = {
        **_EMPTY,
        "cluster_name": "fake",
        "max_workers": 8,
        "idle_timeout_minutes": idle_seconds / 60,
        "provider": {
            "type": "external",
            "module": _PROVIDER,
            "gcs_address": address,
            "head_node_id": _HEAD,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            **{name: {**common, **fields} for name, fields in types.items()},
        },
    }
    file = Path(folder) / "autoscaler.json"
    file.write_text(json.dumps(config))
    # Processes that Ray leaves behind become children of this process.
    adopt_orphans()
    token = Path(folder) / "token"
    token.write_text(secrets.token_hex(32))
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    reset_auth_token_state()  # Ray has read the variables when it was imported
    # A handle's thread that outlives the connection would otherwise start another cluster.
    auto_init_hook.enable_auto_connect = False
    head = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": _HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
        "RAY_worker_niceness": "0",
        "PYTHONPATH": str(ROOT),
    }
    start = ["start", "--head", f"--port={address.partition(':')[2]}", "--num-cpus=0"]
    start += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--disable-usage-stats"]
    start += ["--include-dashboard=false", "--object-store-memory=104857600"]
    start += [f"--autoscaling-config={file}"]
    try:
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *start],
            env={**os.environ, **head},
            check=True,
            stdout=sys.stderr,
            timeout=60,
        )
        yield address
    finally:
        stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def stop_all(seconds: float = 10.0) -> None:
    """End all descendants of this process."""
    deadline = time.monotonic() + seconds
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def report_of(module: str, out: Path, seconds: float, *arguments: str) -> dict[str, Any]:
    """Run `python -m module --out out`, which starts its own cluster, and return its JSON
    report."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--out", str(out), *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, log = process.communicate(timeout=seconds)
    finally:
        process.terminate()  # it ends its cluster
        process.wait(60)
    assert out.exists(), log[-4000:]
    return dict(json.loads(out.read_text()))
