"""listeners, holder: find this machine's listening TCP sockets and their processes in /proc.

Without /proc no socket is found.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A listening TCP socket. inode: its inode number, by which /proc finds its process."""

    address: str
    port: int
    inode: str


def listeners() -> list[ListeningSocket]:
    """Return all listening TCP sockets; an empty list without /proc."""
    sockets = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, port = fields[1].split(":")
                sockets.append(ListeningSocket(_address(address, family), int(port, 16), fields[9]))
    return sockets


def holder(port: int) -> str | None:
    """Return "pid 123 (name)" for the process that listens on a port; None if it is unknown."""
    sockets = {f"socket:[{item.inode}]" for item in listeners() if item.port == port}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(os.readlink(entry) in sockets for entry in (process / "fd").iterdir()):
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            # The process has ended, or belongs to another user.
            continue
    return None


def why_not_bindable(host: str, port: int) -> str | None:
    """Return the reason why a server cannot listen at an address, with a suggestion; None if it
    can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        return f"{host} is not an address ({error.strerror})"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except PermissionError:
            return f"port {port} needs more rights; take one above 1023 with --port"
        except OSError as error:
            if who := holder(port):
                return (
                    f"port {port} is in use by {who}; stop it or choose another with --port. To "
                    "change what a manta serve runs there, give this one its --address"
                )
            if error.errno == 99:  # EADDRNOTAVAIL
                return f"{host} is no address of this machine"
            return f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
    return None


def _address(text: str, family: int) -> str:
    """Convert an IP address in /proc/net/tcp to its usual form.

    The kernel prints an address as hexadecimal words in the machine's byte order.
    """
    raw = bytes.fromhex(text)
    words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
    return socket.inet_ntop(family, b"".join(words))
