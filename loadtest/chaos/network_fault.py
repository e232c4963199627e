"""A way between the clients and the server that can be made slow, silent or broken.

The clients connect to a proxy of ours instead of the server. The proxy does not read the bytes.
Each chunk then passes through one more process, from start to end of a run that has a network
fault. Other runs have no proxy.
"""

import asyncio
import contextlib
from collections.abc import Iterable

from loadtest.http import Address, clock

_PIECE_BYTES = 2**16
_QUEUE = 1024  # pieces on their way in one direction; a longer delay slows the sender down


class NetworkProxy:
    """A proxy to one address. delay_s: how much later bytes that arrive from now on go on, each
    way."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen on loopback; the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=2048)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def hold(self) -> None:
        """Nothing passes, in either direction, until release()."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def cut(self) -> int:
        """Reset all connections; how many."""
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
            writer.transport.abort()  # no server there: as without us, but for the wording
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
        """Pass one direction's bytes on, until its end or a broken connection. Then the other
        direction ends too."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE)

        async def take() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(_PIECE_BYTES)
                except OSError:
                    writer.transport.abort()
                    data = b""
                await pieces.put((clock() + self.delay_s, data))

        taking = asyncio.create_task(take())
        try:
            while True:
                due, data = await pieces.get()
                if (left := due - clock()) > 0:
                    await asyncio.sleep(left)
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
    """Open a proxy for each server, and return where each listens."""
    proxies = [NetworkProxy(Address.of(url)) for url in urls]
    return proxies, [await proxy.start() for proxy in proxies]
