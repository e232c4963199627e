"""A proxy that cuts connections, as happens when a router or HAProxy is killed."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Cutter:
    """A proxy that cuts connections.

    limits: for each connection in turn, bytes of the answer before it is cut; 0: at once. Later
        connections are not cut.
    says: for each connection in turn after these, the proxy's own answer, which it sends instead of
        connecting to the server.
    """

    def __init__(self, port: int) -> None:
        self.limits: list[int] = []
        self.says: list[bytes] = []
        self.connections = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                if self.says and not self.limits:
                    threading.Thread(target=_say, args=(connection, self.says.pop(0))).start()
                    continue
                limit = self.limits.pop(0) if self.limits else 1 << 40
                threading.Thread(target=self._carry, args=(connection, limit), daemon=True).start()

    def _carry(self, client: socket.socket, limit: int) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as to:
            threading.Thread(target=_pump, args=(client, to), daemon=True).start()
            while limit and (data := to.recv(min(limit, 4096))):
                client.sendall(data)
                limit -= len(data)
            to.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # ends the other thread's wait, which close would not
            client.shutdown(socket.SHUT_RDWR)
        client.close()

    def send_to(self, port: int) -> None:
        """Send connections to this port from now on."""
        self._to = port

    def close(self) -> None:
        self._listener.close()


def _say(client: socket.socket, answer: bytes) -> None:
    head = b""
    with client, contextlib.suppress(OSError):
        while b"\r\n\r\n" not in head or not head.endswith(b"}"):
            head += client.recv(4096)
        client.sendall(answer)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)


@contextlib.contextmanager
def cutter(port: int) -> Iterator[Cutter]:
    cutter = Cutter(port)
    try:
        yield cutter
    finally:
        cutter.close()
