"""`manta serve`: deploys, waits until requests are answered, serves until Ctrl-C, and cleans up."""

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

from deployments.checkpoints.resolve import resolve_model, with_drafter
from deployments.cli.console import StatusLine, err, model_progress
from deployments.cli.serving.cluster import Cluster
from deployments.cli.serving.driver import Driver, RayLostError
from deployments.cli.serving.processes import kill, leftovers
from deployments.cli.serving.start_checks import START_CHECKS
from deployments.cli.serving.supervisor import OnceReady, ServeError, Supervisor
from deployments.cli.target import read_target
from deployments.config.load import MantaConfig, check_encoders
from deployments.config.tls import client_context
from deployments.environment import asks_for_token, gpus_here
from deployments.error_text import reason
from deployments.haproxy.launch import complaint
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.shards import read_headers

_POLL = 0.2  # seconds between polls of Serve during the start
_POLL_SECONDS = 5.0  # seconds between two polls of the cluster's nodes
_BEAT = 2.0  # seconds between polls of the running application
_READY_SECONDS = 30.0  # maximum seconds from Serve's "RUNNING" to a 200 of /ready


def run(
    spec: str,
    *,
    host: str | None = None,
    port: int | None = None,
    address: str | None = None,
    once_ready: OnceReady | None = None,
) -> int:
    """Serve until a signal comes, and return the exit code.

    Ctrl-C stops at once and returns 130. SIGTERM waits up to limits.drain_seconds for running
    requests and returns 0.

    address: address of the Ray cluster to join; None: see `Cluster`.
    once_ready: called when the endpoint answers, with its URL and the configuration; if it returns
        False, serving ends with code 0.

    Raises ConfigError before anything is started, MantaError if the start fails, and RayLostError
    if a Ray node was lost and the restart limit is reached.
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
    """Kill the remaining processes of an earlier `manta serve` that was killed, as they may occupy
    the port, the GPU and memory."""
    if processes := leftovers():
        names = ", ".join(f"{process.name} ({pid})" for pid, process in processes.items())
        err.print(f"Ending what a killed manta serve has left: {names}", markup=False)
        kill(leftovers)


def _with_http(config: MantaConfig, host: str | None, port: int | None) -> MantaConfig:
    update = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    return config.model_copy(update={"http": config.http.model_copy(update=update)})


def _serve(driver: Driver, cluster: Cluster, config: MantaConfig, folder: str) -> None:
    """Run the driver process: start or join Ray, deploy, and send reports until told to stop.

    Models are downloaded before Ray is started. In a joined cluster, replicas download them.

    folder: folder for the sockets and files of HAProxy, if this process starts Ray.
    Raises MantaError; RayLostError if Ray is gone.
    """
    if cluster.own:
        from deployments.cluster_capacity import check_pools, this_machine

        check_pools(config, this_machine())
        # Models are downloaded here, where progress is shown; replicas then find them in the cache.
        with model_progress() as progress:
            for part in config.by_model().values():
                dummy = part.engine.get("load_format") == "dummy"
                for blocks in part.kept_blocks(gpus_here()):
                    model_folder = resolve_model(
                        part.model, part.revision, progress, weights=not dummy, blocks=blocks
                    )
                    # Headers are checked now, as a replica would report an error only after a
                    # minute.
                    if not dummy:
                        read_headers(model_folder)
                    check_encoders(part, ModelConfig.from_folder(model_folder))
                for pool in part.pools_on(gpus_here()).values():
                    with_drafter(part.engine_options(pool), model_folder, weights=not dummy)
    driver.ignore(signal.SIGINT)
    driver.report(model=True)
    with StatusLine("Starting Ray" if cluster.own else f"Joining Ray at {cluster.address}"):
        cluster.start(config, folder)
    driver.ignore(signal.SIGTERM)  # set again, as Ray has installed its own handler
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
    """Deploy the application, unless the driver is stopping, and wait until it answers.

    Raises ConfigError if replicas do not fit, ServeError, and Ray's exceptions.
    """
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
    """Return a description of the pools whose replicas need nodes that have not started; "" if all
    replicas fit.

    Raises ConfigError if replicas do not fit and nothing can start nodes.
    """
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
    """Wait until Serve reports the application as running.

    check_room: returns a description of the pools that wait for nodes; may raise ConfigError.

    Raises ServeError with the reason if the application fails.
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
            # A name with a dot belongs to the application of one of several models.
            of = f" of {app_name}" if "." in app_name else ""
            messages = [
                *(deployment.message for deployment in app.deployments.values()),
                app.message,
            ]
            if app.status in ("DEPLOY_FAILED", "UNHEALTHY", "DELETING"):
                raise ServeError(f"the deployment{of} failed: {why_failed(messages)}")
            counts = []
            for name, deployment in app.deployments.items():
                if name == MODEL:
                    # This deployment never has a replica.
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

    Serve reports "RUNNING" a moment before its proxy knows the routers and, if a pool may be empty,
    before the pool's first replica has started.
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
    """Return a connection to the proxy of this server.

    With TLS, the proxy must have the configured certificate; host names are not checked.
    """
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
    """Return the address by which clients on this machine reach the address of `http.host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.http.host, config.http.host)


def _url(config: MantaConfig) -> str:
    host = _reachable(config)
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if config.http.tls.certificate else "http"
    return f"{scheme}://{host}:{config.http.port}{config.route_prefix.rstrip('/')}"


def _about(config: MantaConfig) -> list[str]:
    """Return the lines that tell a user how to use the running server."""
    import ray

    url = _url(config)
    names = list(config.by_model())
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
    """Return the option --key for the `manta chat` command that is shown to the user.

    The option names the keys file if the file begins with a key in plain text, and else a
    placeholder. Without a keys file the result is "".
    """
    file = config.http.api_keys_file
    if file is None:
        return ""
    readable = not Path(file).read_text("utf-8").lstrip().startswith(("sha256:", "#"))
    return f" --key {shlex.quote(file) if readable else 'FILE_WITH_A_KEY'}"


def _logs() -> list[str]:
    """Return the line that states where Ray's processes write logs, and the maximum size of the
    logs."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is None:
        # A process that is connected through Ray's client has no node.
        return []
    most, before = node.max_bytes >> 20, node.backup_count
    return [
        f"Logs: {node.get_logs_dir_path()}/serve, each file to {most} MiB and {before} "
        "older ones; see docs/deploy.md"
    ]


def _stay(driver: Driver, app_name: str) -> None:
    """Report every `_BEAT` seconds that the application runs, until the supervisor ends this
    process.

    Missing reports tell the supervisor that a call hangs. Raises ServeError if the application was
    deleted.
    """
    from ray import serve

    while not driver.stopping:
        if app_name not in serve.status().applications:
            raise ServeError(f"application {app_name!r} was deleted")
        driver.report(beat=True)
        time.sleep(_BEAT)
