"""NetworkProxy: a proxy between clients and server that can delay, pause or cut the traffic.

Clients connect to the proxy instead of the server. The proxy forwards bytes without interpreting
them. In a run with network faults all traffic passes through the proxy for the whole run; other
runs have no proxy.
"""

import asyncio
import contextlib
from collections.abc import Iterable

from loadtest.http import Address, clock

_PIECE_BYTES = 2**16
_QUEUE = 1024  # maximum chunks buffered in one direction; longer delays slow the sender down


class NetworkProxy:
    """A TCP proxy to one address.

    delay_s: seconds by which bytes that arrive from now on are delayed, in each direction.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self.delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen on a free loopback port, and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=2048)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def hold(self) -> None:
        """Hold all bytes in both directions until release()."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def cut(self) -> int:
        """Reset all connections, and return their number."""
        cut = len(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        return cut // 2

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far = await asyncio.open_connection(self._address.host, self._address.port)
        except OSError:
            # no server listens: the client sees a failed connection, as without the proxy
            writer.transport.abort()
            return
        self._writers |= {writer, far}
        ways = (self._pump(reader, far), self._pump(far_reader, writer))
        both = [asyncio.create_task(way) for way in ways]
        self._tasks |= set(both)
        try:
            await asyncio.gather(*both, return_exceptions=True)
        finally:
            for end in (writer, far):
                end.transport.abort()
            self._writers -= {writer, far}
            self._tasks -= set(both)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes of one direction until its end. A broken connection also ends the other
        direction.
        """
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE)

        async def receive() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(_PIECE_BYTES)
                except OSError:
                    writer.transport.abort()
                    data = b""
                await pieces.put((clock() + self.delay_s, data))

        taking = asyncio.create_task(receive())
        try:
            while True:
                due, data = await pieces.get()
                if (seconds := due - clock()) > 0:
                    await asyncio.sleep(seconds)
                await self._open.wait()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            with contextlib.suppress(OSError, NotImplementedError):  # TLS has no half-closed state
                writer.write_eof()
        except OSError:
            writer.transport.abort()
        finally:
            taking.cancel()


async def open_proxies(urls: Iterable[str]) -> tuple[list[NetworkProxy], list[int]]:
    """Open a proxy for each server, and return the proxies and their ports."""
    proxies = [NetworkProxy(Address.of(url)) for url in urls]
    return proxies, [await proxy.start() for proxy in proxies]
