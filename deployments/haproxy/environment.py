"""The environment variables of Ray's processes that configure Serve's HAProxy."""

import contextlib
import random
import socket
from collections.abc import Collection
from pathlib import Path

from deployments.config.models import MantaConfig
from deployments.haproxy.launch import chosen_binary, install
from deployments.haproxy.settings import VARIABLE, EdgeSettings
from engine.errors import ConfigError
from engine.private_folder import private_folder

# Range of candidate ports: those from 10002 are for Ray's processes, from 30000 for routers, from
# 32768 for connections.
_PORTS = range(20_000, 30_000)
_MAX_FOLDER = 26  # characters: haproxy accepts a socket path of 97, and Serve adds a node id


def edge_folder() -> Path:
    """Return a new folder for HAProxy's sockets, files and launcher, which only this user can
    enter.

    The caller removes it. Raises ConfigError.
    """
    try:
        return private_folder(_MAX_FOLDER, programs=True)
    except ConfigError as error:
        raise ConfigError(f"{error.message}, or http.proxy: serve", param="http.proxy") from None


def haproxy_environment(config: MantaConfig, folder: Path) -> dict[str, str]:
    """Return the environment variables of a cluster behind HAProxy.

    folder: folder for HAProxy's sockets and files; the launcher is written there.

    Raises ConfigError.
    """
    if len(str(folder)) > _MAX_FOLDER:
        raise ConfigError(
            f"{folder}: haproxy's sockets need a folder of at most {_MAX_FOLDER} "
            "characters; give a shorter one, or http.proxy: serve",
            param="http.proxy",
        )
    longest = config.http.max_stream_seconds
    ours = {config.http.port, config.grpc.port}
    fallback, stats, metrics = map(str, _free_ports(3, without=ours))
    edge = EdgeSettings(
        host=config.http.host,
        certificate=config.http.tls.certificate or "",
        key=config.http.tls.key or "",
        connections=config.http.connections,
        connections_per_address=config.http.connections_per_address,
        prefix=config.route_prefix,
        binary=chosen_binary(),
    )
    return {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(longest),
        "RAY_SERVE_PORT_QUARANTINE_S": str(longest + 30),
        # Maximum silence of a client that sends a head or body, or that does not read; silent
        # streams are not affected. A little longer than the routers' own limit, as routers refuse
        # with error objects.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "35",
        # If a router ends before it has sent a byte, the request is sent to another router,
        # provided that it fits into haproxy's buffer (rewrite.py). haproxy's default is 3 retries,
        # some of which may go to the dead router again.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # Seconds for which a stopping router stays reachable; haproxy is notified within one
        # second.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        # The port to which haproxy sends requests that no router can accept. With Serve's default,
        # 8500, two clusters on one machine would answer each other's requests.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback,
        "RAY_SERVE_HAPROXY_STATS_PORT": stats,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_install(folder)),
        VARIABLE: edge.encode(),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
    }


def _free_ports(count: int, without: Collection[int | None]) -> list[int]:
    """Return different free ports, which HAProxy binds some seconds later. Ports that the system
    may use for outgoing connections, or Ray for its processes, are avoided. Raises ConfigError.

    without: further ports to avoid, which the server itself binds later.
    """
    candidates = [port for port in _PORTS if port not in without]
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(candidates, len(candidates)):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise ConfigError(f"no {count} free ports from {_PORTS[0]} to {_PORTS[-1]} for haproxy")


def _install(folder: Path) -> Path:
    try:
        return install(folder / "haproxy")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", param="http.proxy") from None
