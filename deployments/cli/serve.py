"""`manta serve`: deploy, wait until it answers, stay until Ctrl-C, leave nothing behind."""

import contextlib
import http.client
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from deployments.cli.cluster import Cluster
from deployments.cli.console import Status, err, model_progress, out
from deployments.cli.ports import why_not_bindable
from deployments.cli.target import read_target
from deployments.config import MantaConfig
from deployments.environment import asks_for_token
from deployments.models import resolve_model
from engine.errors import ConfigError, MantaError

_POLL = 0.2  # seconds
_STOPS = (signal.SIGINT, signal.SIGTERM)
_READY_SECONDS = 30.0  # from Serve's "running" to the first good answer of /ready


class ServeError(MantaError):
    """The application could not be deployed."""

    code = "deploy_failed"


def run(
    spec: str,
    *,
    host: str | None = None,
    port: int | None = None,
    address: str | None = None,
    once_ready: Callable[[str, MantaConfig], bool] | None = None,
) -> int:
    """Serve until Ctrl-C, and return 130; or until SIGTERM, let what is in flight end for
    limits.drain_seconds, and return 0.

    once_ready: called with the endpoint's URL when it answers; False ends the serving, exit 0.
    Raises ConfigError before anything is started, MantaError when it cannot be.
    """
    config = _with_http(read_target(spec), host, port)
    cluster = Cluster(address)
    if cluster.own and (why := why_not_bindable(config.http.host, config.http.port)):
        raise ConfigError(f"http.port: {why}", param="http.port")
    try:
        with _signals(cluster) as signals:
            try:
                _start(cluster, config)
                signals.install()  # Ray has put its own in place of SIGTERM's
                url = _announce(config)
                signals.serving = True
                if once_ready is not None and not once_ready(url, config):
                    return 0
                _stay(config.app_name)
            except Exception:
                # A Ctrl-C inside an import or a callback comes out as whatever that makes of it.
                if not signals.seen:
                    raise
                return signals.exit_code
            except KeyboardInterrupt:
                return signals.exit_code
            finally:
                waits = signals.drain or (signals.serving and not cluster.own)
                with Status("Stopping"):
                    cluster.close(config.app_name, config.limits.drain_seconds if waits else None)
    except KeyboardInterrupt:
        return 130
    return 0


def _with_http(config: MantaConfig, host: str | None, port: int | None) -> MantaConfig:
    update = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    return config.model_copy(update={"http": config.http.model_copy(update=update)})


def _start(cluster: Cluster, config: MantaConfig) -> None:
    if cluster.own:
        # Here rather than in the replicas, where nobody sees the progress. They find it cached.
        dummy = config.engine.get("load_format") == "dummy"
        with model_progress() as progress:
            resolve_model(config.model, config.revision, progress, weights=not dummy)
    with Status("Starting Ray" if cluster.own else f"Joining Ray at {cluster.address}"):
        cluster.start(config)
    from deployments.app import deploy, serve_config

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with Status("Starting Serve"):
        deploy(serve_config(config))
    with Status("Starting the replicas") as status:
        _wait_running(config.app_name, status)
        cluster.note_deployment(config.app_name)
        _wait_ready(config, status)


def _wait_running(app_name: str, status: Status) -> None:
    """Raises ServeError with the reason when it will not come up."""
    from ray import serve
    from ray.serve._private.common import ReplicaState

    while True:
        app = serve.status().applications.get(app_name)
        if app is not None:
            if app.status == "RUNNING":
                return
            if app.status in ("DEPLOY_FAILED", "UNHEALTHY", "DELETING"):
                raise ServeError(f"the deployment failed: {_reason(app)}")
            counts = []
            for name, deployment in app.deployments.items():
                running = deployment.replica_states.get(ReplicaState.RUNNING, 0)
                total = sum(deployment.replica_states.values())
                counts.append(f"{name} {running}/{total}")
            status.update(f"Starting the replicas: {', '.join(counts) or 'placing them'}")
        time.sleep(_POLL)


def _reason(app: Any) -> str:
    """The line that says what went wrong: in a traceback the last, of the deepest cause."""
    messages = [deployment.message for deployment in app.deployments.values()]
    for message in (*messages, app.message):
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line and not line.startswith("File")]
        if errors:
            return errors[-1]
    return app.message.strip().splitlines()[-1] if app.message.strip() else "no reason given"


def _wait_ready(config: MantaConfig, status: Status) -> None:
    """Serve says "running" a moment before its HTTP edge knows the routers; and where a pool may
    be empty, before its first replica has begun to start."""
    status.update("Waiting for the first good answer")
    deadline = time.monotonic() + _READY_SECONDS
    path = config.route_prefix.rstrip("/") + "/ready"
    answer = "no answer"
    while time.monotonic() < deadline:
        if answer == "status 503" and _starting(config.app_name):
            deadline = time.monotonic() + _READY_SECONDS
        try:
            connection = http.client.HTTPConnection(_reachable(config), config.http.port, timeout=5)
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            if response.status == 200:
                return
            answer = f"status {response.status}"
        except (OSError, http.client.HTTPException) as error:
            answer = str(error)
        time.sleep(_POLL)
    raise ServeError(
        f"{_url(config)} does not answer /ready after {_READY_SECONDS:.0f} s: {answer}"
    )


def _starting(app_name: str) -> bool:
    from ray import serve
    from ray.serve._private.common import ReplicaState

    app = serve.status().applications.get(app_name)
    deployments = app.deployments.values() if app is not None else ()
    return any(one.replica_states.get(ReplicaState.STARTING, 0) for one in deployments)


def _reachable(config: MantaConfig) -> str:
    """An address to connect to for one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.http.host, config.http.host)


def _url(config: MantaConfig) -> str:
    host = _reachable(config)
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{config.http.port}{config.route_prefix.rstrip('/')}"


def _announce(config: MantaConfig) -> str:
    url = _url(config)
    body = {
        "model": config.name(),
        "messages": [{"role": "user", "content": "Say hello."}],
        "stream": True,
    }
    key = '-H "Authorization: Bearer $KEY" ' if config.http.api_keys_file else ""
    out.print(f"Serving {config.name()} at {url}/v1 (Ctrl-C stops)", markup=False)
    out.print(
        f"  curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'",
        markup=False,
    )
    out.print(f"  manta chat {url}", markup=False)
    import ray

    address = ray.get_runtime_context().gcs_address
    token = "RAY_AUTH_MODE=token " if asks_for_token() else ""
    name = "" if config.app_name == "manta" else f" {config.app_name}"
    out.print(f"  {token}manta status{name} --address {address}", markup=False)
    out.print(f"Other Ray jobs: {token}RAY_ADDRESS={address}, see docs/python.md", markup=False)
    return url


def _stay(app_name: str) -> None:
    """Until a signal comes. Raises ServeError when the application is deleted or Ray is gone."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    while True:
        time.sleep(5)
        try:
            gone = app_name not in serve.status().applications
        except (RayError, RayServeException) as error:
            raise ServeError(f"Ray has ended: {str(error).splitlines()[0]}") from error
        if gone:
            raise ServeError(f"application {app_name!r} was deleted")


class _Signals:
    """First SIGINT or SIGTERM: KeyboardInterrupt, a clean stop. Second: everything ends at once.

    seen: signals so far. serving: there may be requests.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.seen = 0
        self.serving = False
        self._terminated = False
        self._cluster = cluster

    def install(self) -> None:
        for number in _STOPS:
            signal.signal(number, self._handle)

    @property
    def drain(self) -> bool:
        """A supervisor asks by SIGTERM and waits; who presses Ctrl-C does not want to."""
        return self._terminated and self.serving

    @property
    def exit_code(self) -> int:
        return 0 if self.drain else 130

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.seen += 1
        if self.seen > 1:
            self._cluster.kill()
            os._exit(130)
        self._terminated = number == signal.SIGTERM
        how = "Letting requests end" if self.drain else "Stopping; SIGTERM would let requests end"
        err.print(f"{how}. Once more to stop at once")
        raise KeyboardInterrupt


@contextlib.contextmanager
def _signals(cluster: Cluster) -> Iterator[_Signals]:
    before = {number: signal.getsignal(number) for number in _STOPS}
    signals = _Signals(cluster)
    signals.install()
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
