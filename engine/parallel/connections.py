"""Connections between rank 0 and the ranks on other nodes of a cluster.

The connections carry pickled Python objects, like the pipes inside a machine. So both sides first
prove that they have the same key. Nothing is encrypted.
"""

import contextlib
import os
import socket
import struct
from fcntl import ioctl
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

_CONNECT_SECONDS = 20.0
_HANDSHAKE_SECONDS = 5
# TCP keepalive: a node that does not respond, as after a power cut, counts as lost after 8 seconds.
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 2, 2, 3
_UNANSWERED_MS = 8000
_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>


class RemoteRanks(msgspec.Struct, frozen=True):
    """The ranks of an engine on other nodes.

    address: the address at which other nodes reach rank 0's node.
    hosts: address and port of each other node's `RankHost`, in the order of ranks.
    key: the secret shared by all nodes.
    """

    address: str
    hosts: tuple[tuple[str, int], ...]
    key: bytes


def connect(address: str, port: int, key: bytes) -> "Connection[Any, Any]":
    """Connect to a node, and return the connection after both sides have proved that they have the
    key.

    Raises OSError, EOFError, AuthenticationError.
    """
    endpoint = socket.create_connection((address, port), _CONNECT_SECONDS)
    endpoint.settimeout(None)
    connection = _connection(endpoint)
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    _set_timeout(connection, 0)
    return connection


def accept(listener: socket.socket, key: bytes) -> "Connection[Any, Any]":
    """Accept connections until the other side of one proves that it has the key; return that one.

    Raises OSError once the listener is closed.
    """
    while True:
        endpoint, _ = listener.accept()
        connection = _connection(endpoint)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            continue
        _set_timeout(connection, 0)
        return connection


def hang_up(connection: "Connection[Any, Any]", how: int = socket.SHUT_WR) -> None:
    """Shut down a connection, so that the other side reads the end of the stream.

    how: SHUT_WR ends only sending; SHUT_RDWR also wakes threads of this process that wait for data.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(how)


def use_interface(address: str) -> None:
    """Make gloo and NCCL use the interface with an address, here and in child processes.

    Nothing changes if the environment names an interface, or if no interface has the address as
    its first one.
    """
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                asked = struct.pack("256s", name.encode()[:15])
                packed = ioctl(any_socket, _SIOCGIFADDR, asked)[20:24]
            except OSError:  # the interface has no address
                continue
        if socket.inet_ntoa(packed) == address:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
            return


def _connection(ours: socket.socket) -> "Connection[Any, Any]":
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    connection: Connection[Any, Any] = Connection(ours.detach())
    _set_timeout(connection, _HANDSHAKE_SECONDS)
    return connection


def _set_timeout(connection: "Connection[Any, Any]", seconds: int) -> None:
    """Set the timeout of each read and write; 0 = no timeout."""
    value = struct.pack("ll", seconds, 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
