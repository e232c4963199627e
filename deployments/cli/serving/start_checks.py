"""START_CHECKS: the checks of this machine before a server starts.

`manta serve` stops at the first failed check; `manta doctor` reports all.
"""

import shutil
from collections.abc import Callable
from typing import NamedTuple

from deployments.cli.ports import why_not_bindable
from deployments.cli.serving.cluster import serving_folder
from deployments.cli.serving.ray_folder import ray_folder
from deployments.config.load import MantaConfig
from deployments.packages import why_mixed
from deployments.serve.proxy import behind_haproxy, check_edge
from engine.errors import ConfigError


class StartCheck(NamedTuple):
    """A check of this machine before a server starts.

    check: returns a description of the good state; raises ConfigError with a suggestion.
    state: state of a failed check in `manta doctor`.
    own: whether the check applies only if Ray is started, not if a cluster is joined.
    """

    name: str
    check: Callable[[MantaConfig], str]
    state: str = "MISSING"
    own: bool = True


def _packages(config: MantaConfig) -> str:
    if mixed := why_mixed():
        raise ConfigError(mixed)
    return "Manta's own are found"


def _ray_folder(config: MantaConfig) -> str:
    return f"Ray's sockets and logs go to {ray_folder()}"


def _edge(config: MantaConfig) -> str:
    check_edge(config)
    folder = serving_folder(config)
    shutil.rmtree(folder, ignore_errors=True)
    what = "haproxy, its sockets and programs" if behind_haproxy(config) else "Serve's own proxy"
    return f"{what}, in a folder such as {folder}"


def _ports(config: MantaConfig) -> str:
    ports = {"http.port": config.http.port, "grpc.port": config.grpc.port}
    for key, port in ports.items():
        if port is not None and (why := why_not_bindable(config.http.host, port)):
            raise ConfigError(f"{key}: {why}", param=key)
    return " and ".join(str(port) for port in ports.values() if port is not None) + " free"


START_CHECKS = (
    StartCheck("packages", _packages, own=False),
    StartCheck("ray folder", _ray_folder),
    StartCheck("edge", _edge),
    StartCheck("ports", _ports, "note"),  # a note: a running manta serve probably uses the port
)
