"""The Ray cluster under `manta serve`: one of our own that ends with us, or one we join."""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deployments.adapters.book import forget_app
from deployments.config import MantaConfig
from deployments.environment import ray_address, set_for_children
from engine.errors import MantaError

_PR_SET_CHILD_SUBREAPER = 36
_DRAIN_MARGIN = 5.0  # seconds for routers to say that they are done
_OBJECT_STORE = 256 << 20  # bytes; tokens never pass through it, only Serve's small messages do


class ClusterError(MantaError):
    """Ray could not be started or joined."""

    code = "cluster_error"


def _deployed_at(app_name: str) -> float:
    """Unix seconds; 0 if it is not there. Raises what `serve.status` does."""
    from ray import serve

    app = serve.status().applications.get(app_name)
    return float(app.last_deployed_time_s) if app is not None else 0.0


class Cluster:
    """Own: started by us on this machine and stopped by `close`. Joined: left running."""

    def __init__(self, address: str | None) -> None:
        self.address = address if address is not None else ray_address() or _running_here()
        self.own = self.address in (None, "local")
        self._folder: str | None = None
        self._deployed = 0.0  # when Serve took our deployment

    def start(self, config: MantaConfig) -> None:
        """Raises ClusterError."""
        if self.own:
            # Whatever Ray's processes leave behind when they are killed becomes our child, and
            # `kill` finds it.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._folder = tempfile.mkdtemp(prefix="manta-serve-")
        import ray

        from deployments.app import cluster_environment

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._folder is not None:
            environment = cluster_environment(config, self._folder)
            environment["PYTHONPATH"] = os.pathsep.join(
                dict.fromkeys([_source_folder(), *filter(None, sys.path[:1])])
            )
            set_for_children(environment)
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE,
            }
        else:
            options["address"] = self.address
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            what = "start Ray" if self.own else f"join Ray at {self.address}"
            raise ClusterError(f"cannot {what}: {reason}; `manta doctor` may tell more") from error

    def note_deployment(self, app_name: str) -> None:
        """Our application runs now; `close` leaves alone what somebody deploys in its place."""
        self._deployed = _deployed_at(app_name)

    def close(self, app_name: str, drain_seconds: float | None = None) -> None:
        """Stop what we started: our own Ray, or our application in a joined one, unless somebody
        has deployed it anew since then.

        drain_seconds: nothing new is taken, and what is in flight has so long to end first. None:
        no time.

        Serve's own shutdown is not used for the first: with direct ingress it waits at least 30 s.
        """
        # A Ctrl-C may have come in the middle of `import ray`; then there is nothing to stop.
        ray = sys.modules.get("ray")
        if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
            if drain_seconds is not None or not self.own:
                from ray import serve

                # Nothing to delete if the controller is gone or never came up.
                gone = (
                    ray.exceptions.RayError,
                    serve.exceptions.RayServeException,
                    TimeoutError,
                    OSError,
                )
                with contextlib.suppress(*gone):
                    if not self.own and _deployed_at(app_name) > self._deployed > 0:
                        ray.shutdown()
                        return
                seconds = drain_seconds or 0.0
                with contextlib.suppress(*gone):  # e.g. one of the routers
                    calls = serve.get_app_handle(app_name).broadcast("drain", seconds)
                    calls.results(timeout_s=seconds + _DRAIN_MARGIN)
                with contextlib.suppress(*gone):
                    serve.delete(app_name)
                    forget_app(app_name)
            ray.shutdown()
        self.kill()

    def kill(self) -> None:
        """End every process of our own cluster now. Does nothing to a joined one."""
        if not self.own:
            return
        deadline = time.monotonic() + 5
        while pids := _descendants(os.getpid()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _running_here() -> str | None:
    """The address that `ray start` has left for this machine, if that cluster still runs."""
    from ray._private.services import find_gcs_addresses

    with contextlib.suppress(OSError):
        address = Path(tempfile.gettempdir(), "ray", "ray_current_cluster").read_text().strip()
        if address in find_gcs_addresses():
            return address
    return None


def _source_folder() -> str:
    """Where Ray's workers find `deployments`, also when it runs from a source folder."""
    return str(Path(__file__).parents[2])


def _descendants(root: int) -> list[int]:
    """Live processes below a process, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(process.name))
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found
