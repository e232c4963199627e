"""Cluster: the Ray cluster of `manta serve`, which is started and ended by the command, or
joined."""

import contextlib
import logging
import os
import shutil
import sys
from typing import Any

from deployments.cli.serving.joining import ClusterError, job_config, join, running_here
from deployments.cli.serving.processes import adopt_orphans, descendants, kill, reap
from deployments.cli.serving.ray_folder import ray_folder
from deployments.cli.serving.time_limit import within
from deployments.cluster_store import forget_app
from deployments.config.load import MantaConfig
from deployments.environment import (
    make_auth_token,
    no_ray_metrics,
    ray_address,
    set_for_children,
)
from deployments.error_text import reason
from deployments.haproxy.environment import edge_folder
from deployments.model_applications import is_model_of
from deployments.packages import SOURCE
from deployments.serve.coexistence import deployed_at
from deployments.serve.proxy import behind_haproxy
from engine.private_folder import MAX_PATH, private_folder

_ANSWER = 5.0  # maximum seconds for Serve's controller to answer
_DRAIN_MARGIN = 5.0  # seconds after a drain in which routers report that they have drained
# Maximum seconds for replicas and routers to end, of which the proxy's update takes 5.
_DELETE = 25.0
# Maximum seconds that `close` takes in addition to the drain.
STOP_SECONDS = 3 * _ANSWER + _DRAIN_MARGIN + _DELETE
# Bytes of Ray's object store, which has only Serve's small messages, as tokens are sent over
# channels.
_OBJECT_STORE = 256 << 20


def _deployed_at(app_name: str) -> float:
    """Return the Unix time at which an application was last deployed; 0 if it does not exist.

    Raises the exceptions of `serve.status`, OSError and TimeoutError.
    """
    from ray import serve

    app = within(_ANSWER, serve.status).applications.get(app_name)
    if app is None:
        return 0.0
    deployed = float(app.last_deployed_time_s)
    return within(_ANSWER, lambda: deployed_at(app_name, deployed))


def serving_folder(config: MantaConfig) -> str:
    """Return a new folder for the sockets and files of the HTTP edge, which the caller removes.

    Raises ConfigError.
    """
    return str(edge_folder() if behind_haproxy(config) else private_folder(MAX_PATH))


class Cluster:
    """The Ray cluster that a server uses: one of its own, or a running one that it joins.

    The server's own cluster runs on this machine and is ended by `close`; a joined one continues to
    run.

    own: whether the cluster is the server's own.
    address: address of the cluster to join, or "local" to start one; None: RAY_ADDRESS, else a
        cluster that runs on this machine, else start one.
    """

    def __init__(self, address: str | None) -> None:
        self.address = address if address is not None else ray_address() or running_here()
        self.own = self.address in (None, "local")
        self._folder: str | None = None
        self._deployed = 0.0  # Unix time at which Serve accepted our deployment; 0: unknown

    def start(self, config: MantaConfig, folder: str | None = None) -> None:
        """Start the server's own cluster, or join the cluster at `address`.

        folder: folder for haproxy's sockets and files, which the caller removes; None: a new one,
            which `close` removes.

        Raises ClusterError.
        """
        if not self.own:
            assert self.address is not None
            join(self.address)
            return
        adopt_orphans()
        if folder is None:
            folder = self._folder = serving_folder(config)
        with contextlib.suppress(OSError):  # if this fails, Ray writes a token or reports an error
            make_auth_token()
        import ray

        from deployments.app import cluster_environment

        environment = cluster_environment(config, folder)
        environment["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys([str(SOURCE), *filter(None, sys.path[:1])])
        )
        if config.http.loopback:
            environment = {**no_ray_metrics(), **environment}
        set_for_children(environment)
        temporary = str(ray_folder())
        try:
            ray.init(
                address="local",
                job_config=job_config([str(SOURCE)]),
                _temp_dir=temporary,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        # Ray raises many types of exceptions, e.g. on a machine that is too busy
        except Exception as error:
            raise ClusterError(
                f"cannot start Ray: {reason(error)}; `manta doctor` may tell more"
            ) from error

    def note_deployment(self, app_name: str) -> None:
        """Record the deployment time of the application, so that `close` does not delete a later
        deployment by another command."""
        # If the time is unknown, `close` deletes the application of this name, whoever deployed it.
        with contextlib.suppress(TimeoutError, OSError):
            self._deployed = _deployed_at(app_name)

    def close(self, app_name: str, drain_seconds: float | None = None) -> None:
        """Stop the server's own cluster, or delete the application from a joined one.

        The application is not deleted if another command has deployed it again. Takes at most
        drain_seconds plus STOP_SECONDS. Serve's shutdown is not called, because with direct ingress
        it waits at least 30 s.

        drain_seconds: seconds for running requests to end while new ones are refused; None: no
            drain, and the server's own cluster ends immediately.
        """
        # If Ctrl-C interrupted `import ray`, there is nothing to stop.
        ray = sys.modules.get("ray")
        if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
            if drain_seconds is not None or not self.own:
                self._stop(app_name, drain_seconds or 0.0)
            with contextlib.suppress(TimeoutError):
                within(_ANSWER, ray.shutdown)
        self.kill()

    def _stop(self, app_name: str, drain_seconds: float) -> None:
        import ray
        from ray import serve

        # These errors mean that Serve's controller or Ray is gone or was never started, so no
        # deletion is needed.
        gone = (
            ray.exceptions.RayError,
            serve.exceptions.RayServeException,
            TimeoutError,
            OSError,
        )
        with contextlib.suppress(*gone):
            if not self.own and _deployed_at(app_name) > self._deployed > 0:
                return
        # A router may have died.
        with contextlib.suppress(*gone):
            handles = within(_ANSWER, lambda: router_handles(serve.status(), app_name))
            within(drain_seconds + _DRAIN_MARGIN, lambda: _drain(handles, drain_seconds))
        with contextlib.suppress(*gone):
            within(_DELETE, lambda: _delete(app_name))

    def kill(self) -> None:
        """Kill every process of the server's own cluster; do nothing for a joined one."""
        if not self.own:
            return

        def below() -> list[int]:
            reap()
            return descendants(os.getpid())

        kill(below)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def router_handles(status: Any, app_name: str) -> list[Any]:
    """Return a handle of each deployment of routers that an application has.

    status: result of `serve.status`.
    """
    from ray import serve

    from deployments.scaling.policy import ROUTERS

    application = status.applications.get(app_name)
    names = application.deployments if application is not None else ()
    return [serve.get_deployment_handle(name, app_name) for name in ROUTERS if name in names]


def _drain(handles: list[Any], seconds: float) -> None:
    drains = [handle.broadcast("drain", seconds) for handle in handles]
    for drain in drains:
        drain.results(timeout_s=seconds + _DRAIN_MARGIN)


def _delete(app_name: str) -> None:
    from ray import serve

    models = [name for name in serve.status().applications if is_model_of(app_name, name)]
    serve.delete(app_name)  # the routers are deleted first, so that no new request arrives
    for name in models:
        serve.delete(name, _blocking=False)
    for name in (app_name, *models):
        forget_app(name)
