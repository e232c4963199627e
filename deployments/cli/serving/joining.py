"""join: probes an address, and joins the Ray cluster there.

Without the probe, Ray's client would try for a minute and a half and log each attempt.
"""

import contextlib
import logging
import socket
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deployments.environment import asks_for_token, auth_token_source
from deployments.error_text import reason
from deployments.packages import SOURCE
from engine.errors import ConfigError, MantaError

# Maximum seconds to connect; TCP sends a lost packet again after 1 and 3 seconds.
_CONNECT = 3.0
_ANSWER = 5.0  # maximum seconds for the first response of the GCS
# Maximum seconds for Ray's client to join; a busy machine takes several.
_JOIN = 60.0
# The file to which `ray start` writes the address, whatever TMPDIR is.
_CURRENT = "/tmp/ray/ray_current_cluster"


class ClusterError(MantaError):
    """The error raised if Ray could not be started or joined, or no longer answers."""

    code = "cluster_error"


def _commands(processes: Path = Path("/proc")) -> Iterator[list[bytes]]:
    """Yield the command line of each process of this machine, split into arguments."""
    for entry in processes.glob("[0-9]*/cmdline"):
        # The process may have ended meanwhile.
        with contextlib.suppress(OSError):
            yield entry.read_bytes().split(b"\0")


def running_here() -> str | None:
    """Return the address that `ray start` has written on this machine; None if there is none or
    that cluster has ended."""
    try:
        address = Path(_CURRENT).read_text().strip()
    except OSError:
        return None
    flags = {f"--gcs-address={address}".encode(), f"--address={address}".encode()}
    return address if any(flags & set(arguments) for arguments in _commands()) else None


def rays_here(processes: Path = Path("/proc")) -> list[str]:
    """Return the sorted addresses of all clusters that have a node on this machine.

    Clusters of other users are included.
    """
    start = b"--gcs-address="
    addresses = {
        argument.removeprefix(start).decode()
        for arguments in _commands(processes)
        if arguments[0].endswith(b"/raylet")
        for argument in arguments
        if argument.startswith(start)
    }
    return sorted(addresses)


def join(address: str) -> None:
    """Run `ray.init` with the address of a running cluster. Does nothing if this process has
    already joined.

    address: host:port, ray://host:port, or "auto" for the cluster that runs on this machine.

    Raises ConfigError for a malformed address. Raises ClusterError if the probe gets no answer
    within 8 s, if `ray.init` fails or takes more than 60 s, or if the cluster refuses the token.
    """
    there = sys.modules.get("ray")
    if there is not None and there.is_initialized():
        return
    if address == "auto" and (running := running_here()) is None:
        raise ClusterError(
            "no Ray was found on this machine; give the --address of one, or `ray start` it"
        )
    address = running if address == "auto" and running else address
    host, port = _parts(address)
    _connect(address, host, port)
    if "://" not in address:
        _ask(address)
    import ray

    from deployments.cli.serving.time_limit import within

    try:
        within(
            _JOIN,
            lambda: ray.init(
                address=address,
                job_config=job_config([] if _installed() else [str(SOURCE)]),
                log_to_driver=False,
                logging_level=logging.ERROR,
            ),
        )
    except Exception as error:
        # Ray raises many types of exceptions.
        raise ClusterError(
            f"cannot join Ray at {address}: {reason(error)}; `manta doctor` may tell more"
        ) from error


def job_config(folders: list[str]) -> Any:
    """Return the JobConfig of a Ray job whose workers import from the given folders first.

    Workers run in the command's folder, but must not import from it, as it may contain a file such
    as engine.py.
    """
    from ray.job_config import JobConfig

    # Jobs of Ray's client then add no other folders; up to Ray 2.60 there is no public option for
    # that.
    return JobConfig(_client_job=True, _py_driver_sys_path=folders)


def _installed() -> bool:
    """Return whether Manta is an installed package rather than a source folder. Other nodes may
    then also have it installed."""
    return str(SOURCE) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _parts(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.hostname and parts.port and parts.scheme in ("", "ray"):
            return parts.hostname, parts.port
    except ValueError:
        pass  # e.g. a port that is not a number
    raise ConfigError(f"--address {address}: not an address; give one like 10.0.0.1:6379")


def _connect(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=_CONNECT).close()
        return
    except TimeoutError:
        why = f"no answer for {_CONNECT:g} s"
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    raise ClusterError(f"cannot join Ray at {address}: {why}; `manta serve` prints its --address")


def _ask(address: str) -> None:
    """Probe the GCS at an address, with the token of Ray's client. Raises ClusterError."""
    import grpc
    from ray._private.gcs_utils import create_gcs_channel
    from ray.core.generated import gcs_service_pb2_grpc
    from ray.core.generated.gcs_service_pb2 import (  # type: ignore[attr-defined]
        GetClusterIdRequest,
    )

    if asks_for_token() and auth_token_source() is None:
        raise ClusterError(
            f"cannot join Ray at {address}: RAY_AUTH_MODE=token is set and there is no token here; "
            "put the cluster's into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    with create_gcs_channel(address) as channel:
        ask = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).GetClusterId
        try:
            ask(GetClusterIdRequest(), timeout=_ANSWER)
        except grpc.RpcError as error:
            raise ClusterError(f"cannot join Ray at {address}: {_refusal(error.code())}") from error


def _refusal(code: Any) -> str:
    import grpc

    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        if asks_for_token():
            return f"it refuses the token from {auth_token_source() or 'this machine'}"
        return (
            "it asks for a token, as one that `manta serve` started does: set RAY_AUTH_MODE=token "
            "in the environment"
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"what listens there has not answered for {_ANSWER:g} s"
    return f"what listens there is no Ray ({code.name.lower()})"
