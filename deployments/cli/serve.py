"""`manta serve`: deploy, wait until it answers, stay until Ctrl-C, leave nothing behind."""

import http.client
import json
import logging
import shlex
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deployments.checkpoints.resolve import resolve_model
from deployments.cli.console import StatusLine, err, model_progress
from deployments.cli.serving.cluster import Cluster
from deployments.cli.serving.driver import Driver, RayLostError
from deployments.cli.serving.processes import kill, leftovers
from deployments.cli.serving.start_checks import START_CHECKS
from deployments.cli.serving.supervisor import OnceReady, ServeError, Supervisor
from deployments.cli.target import read_target
from deployments.config.load import MantaConfig
from deployments.config.tls import client_context
from deployments.environment import asks_for_token, gpus_here
from deployments.error_text import reason
from deployments.haproxy.launch import complaint
from engine.errors import ConfigError
from engine.shards import read_headers

_POLL = 0.2  # seconds
_POLL_SECONDS = 5.0  # seconds between two polls of the cluster's nodes
_BEAT = 2.0  # seconds between two polls of the application
_READY_SECONDS = 30.0  # from Serve's "running" to the first good answer of /ready


def run(
    spec: str,
    *,
    host: str | None = None,
    port: int | None = None,
    address: str | None = None,
    once_ready: OnceReady | None = None,
) -> int:
    """Serve until Ctrl-C, and return 130; or until SIGTERM, let what is in flight end for
    limits.drain_seconds, and return 0.

    once_ready: called with the endpoint's URL when it answers; False ends the serving, exit 0.
    Raises ConfigError before anything is started, MantaError when it cannot be, RayLostError
    when the node was lost and is not to be started again.
    """
    config = _with_http(read_target(spec), host, port)
    if config.http.exposed:
        way_out = "set http.api_keys_file, or http.host: 127.0.0.1"
        err.print(f"warning: {config.http.exposed}; {way_out}", markup=False)
    cluster = Cluster(address)
    if cluster.own:
        _end_leftovers()
    for check in START_CHECKS:
        if cluster.own or not check.own:
            check.check(config)

    def serve(driver: Driver, folder: str) -> None:
        _serve(driver, cluster, config, folder)

    def close(drain_seconds: float | None) -> None:
        cluster.close(config.app_name, drain_seconds)

    return Supervisor(config, cluster, serve, close, once_ready).run()


def _end_leftovers() -> None:
    """End the processes that a killed `manta serve` has left: they may hold the port, the GPU and
    memory."""
    if processes := leftovers():
        names = ", ".join(f"{process.name} ({pid})" for pid, process in processes.items())
        err.print(f"Ending what a killed manta serve has left: {names}", markup=False)
        kill(leftovers)


def _with_http(config: MantaConfig, host: str | None, port: int | None) -> MantaConfig:
    update = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    return config.model_copy(update={"http": config.http.model_copy(update=update)})


def _serve(driver: Driver, cluster: Cluster, config: MantaConfig, folder: str) -> None:
    """Do the driver's work: start or join Ray, deploy, and stay. Raises MantaError; RayLostError
    when Ray is gone."""
    if cluster.own:
        from deployments.cluster_capacity import check_pools, this_machine

        check_pools(config, this_machine())
        # Here rather than in the replicas, whose progress is not shown. They find it cached.
        with model_progress() as progress:
            for part in config.each().values():
                dummy = part.engine.get("load_format") == "dummy"
                for blocks in part.kept_blocks(gpus_here()):
                    model_folder = resolve_model(
                        part.model, part.revision, progress, weights=not dummy, blocks=blocks
                    )
                    if not dummy:  # by a replica that cannot load them it is told after a minute
                        read_headers(model_folder)
    driver.ignore(signal.SIGINT)
    driver.report(model=True)
    with StatusLine("Starting Ray" if cluster.own else f"Joining Ray at {cluster.address}"):
        cluster.start(config, folder)
    driver.ignore(signal.SIGTERM)  # Ray has put a handler of its own in its place
    driver.report(ray=True)
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        _deploy(driver, cluster, config)
        driver.report(serving=_url(config), about=_about(config))
        _stay(driver, config.app_name)
    except (RayError, RayServeException) as error:
        raise RayLostError(f"Ray has ended: {reason(error)}") from error


def _deploy(driver: Driver, cluster: Cluster, config: MantaConfig) -> None:
    """Deploy the application and wait until it answers. Raises ServeError, and what Ray does."""
    from deployments.app import deploy, serve_config

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with StatusLine("Starting Serve"):
        if driver.stopping:
            return
        schema = serve_config(config, one_machine=cluster.own)
        _check_room(config, cluster)
        deploy(schema)
    with StatusLine("Starting the replicas") as status:
        for app in schema["applications"]:
            _wait_running(app["name"], status, partial(_check_room, config, cluster))
        cluster.note_deployment(config.app_name)
        _wait_ready(config, status)


def _check_room(config: MantaConfig, cluster: Cluster) -> str:
    """Describe the pools that wait for nodes; "" if all may find a place. Raises ConfigError where
    nothing starts nodes."""
    from deployments.cluster_capacity import check_pools, cluster_nodes
    from deployments.serve.model_deployments import NodeCapacity

    try:
        check_pools(config, cluster_nodes())
    except ConfigError as error:
        if cluster.own or NodeCapacity.here().grows is False:
            raise
        text, _, _ = error.message.rpartition("; ")
        return f"{text}: waiting for nodes that the cluster's autoscaler may start"
    return ""


def _wait_running(app_name: str, status: StatusLine, check_room: Callable[[], str]) -> None:
    """Wait until Serve says that the application is running. Raises ServeError with the reason when
    it will not come up, and what check_room does.

    check_room: says what waits for nodes.
    """
    from ray import serve
    from ray.serve._private.common import ReplicaState

    from deployments.model_applications import MODEL, why_failed, why_waiting

    waits, look = "", 0.0
    while True:
        if time.monotonic() > look:
            waits, look = check_room(), time.monotonic() + _POLL_SECONDS
        app = serve.status().applications.get(app_name)
        if app is not None:
            if app.status == "RUNNING":
                return
            of = f" of {app_name}" if "." in app_name else ""  # one of several models
            messages = [*(one.message for one in app.deployments.values()), app.message]
            if app.status in ("DEPLOY_FAILED", "UNHEALTHY", "DELETING"):
                raise ServeError(f"the deployment{of} failed: {why_failed(messages)}")
            counts = []
            for name, deployment in app.deployments.items():
                if name == MODEL:  # never has any
                    continue
                running = deployment.replica_states.get(ReplicaState.RUNNING, 0)
                total = sum(deployment.replica_states.values())
                counts.append(f"{name} {running}/{total}")
            why = waits or why_waiting(messages)
            progress = f"{', '.join(counts) or 'placing them'}{of}{f': {why}' if why else ''}"
            status.update(f"Starting the replicas: {progress}")
        time.sleep(_POLL)


def _wait_ready(config: MantaConfig, status: StatusLine) -> None:
    """Wait until /ready answers with status 200. Raises ServeError.

    Serve says "running" a moment before its proxy knows the routers; and where a pool may be
    empty, before its first replica has begun to start.
    """
    status.update("Waiting for the first good answer")
    deadline = time.monotonic() + _READY_SECONDS
    path = config.route_prefix.rstrip("/") + "/ready"
    answer = "no answer"
    while time.monotonic() < deadline:
        if answer == "status 503" and _starting(config.app_name):
            deadline = time.monotonic() + _READY_SECONDS
        try:
            connection = _connection(config)
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
        f"{_url(config)} does not answer /ready after {_READY_SECONDS:.0f} s: "
        f"{complaint() or answer}"
    )


def _connection(config: MantaConfig) -> http.client.HTTPConnection:
    """Return a connection to our own proxy, which is known by its certificate, whatever name that
    has."""
    address, certificate = (_reachable(config), config.http.port), config.http.tls.certificate
    if certificate is None:
        return http.client.HTTPConnection(*address, timeout=5)
    return http.client.HTTPSConnection(*address, timeout=5, context=client_context(certificate))


def _starting(app_name: str) -> bool:
    from ray import serve
    from ray.serve._private.common import ReplicaState

    app = serve.status().applications.get(app_name)
    deployments = app.deployments.values() if app is not None else ()
    return any(status.replica_states.get(ReplicaState.STARTING, 0) for status in deployments)


def _reachable(config: MantaConfig) -> str:
    """An address to connect to for one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.http.host, config.http.host)


def _url(config: MantaConfig) -> str:
    host = _reachable(config)
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if config.http.tls.certificate else "http"
    return f"{scheme}://{host}:{config.http.port}{config.route_prefix.rstrip('/')}"


def _about(config: MantaConfig) -> list[str]:
    """Return the lines that tell a user what to do now."""
    import ray

    url = _url(config)
    names = list(config.each())
    body = {
        "model": names[0],
        "messages": [{"role": "user", "content": "Say hello."}],
        "stream": True,
    }
    key = '-H "Authorization: Bearer $KEY" ' if config.http.api_keys_file else ""
    address = ray.get_runtime_context().gcs_address
    token = "RAY_AUTH_MODE=token " if asks_for_token() else ""
    name = "" if config.app_name == "manta" else f" {config.app_name}"
    return [
        f"Serving {', '.join(names)} at {url}/v1 (Ctrl-C stops)",
        f"  curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'",
        f"  manta chat {url}{_key_option(config)}",
        *([f"  a page: {url}/page"] if config.http.page else []),
        f"  {token}manta status{name} --address {address}",
        f"Other Ray jobs: {token}RAY_ADDRESS={address}, see docs/python.md",
        *_logs(),
    ]


def _key_option(config: MantaConfig) -> str:
    """Return the --key option of `manta chat`: the keys file itself, where its first word is a key
    and no digest of one."""
    file = config.http.api_keys_file
    if file is None:
        return ""
    readable = not Path(file).read_text("utf-8").lstrip().startswith(("sha256:", "#"))
    return f" --key {shlex.quote(file) if readable else 'FILE_WITH_A_KEY'}"


def _logs() -> list[str]:
    """Return the line on where Ray's processes write logs, and how much is kept."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is None:  # Ray's client has none
        return []
    most, before = node.max_bytes >> 20, node.backup_count
    return [
        f"Logs: {node.get_logs_dir_path()}/serve, each file to {most} MiB and {before} "
        "older ones; see docs/deploy.md"
    ]


def _stay(driver: Driver, app_name: str) -> None:
    """Stay until the supervisor ends this process. It notices a call that hangs by missing
    beats."""
    from ray import serve

    while not driver.stopping:
        if app_name not in serve.status().applications:
            raise ServeError(f"application {app_name!r} was deleted")
        driver.report(beat=True)
        time.sleep(_BEAT)
