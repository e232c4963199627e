"""Clients that do not read or do not send: what haproxy's `timeout client` does and does not
cut off. The edge is ours, with the timeout made short."""

import asyncio

from deployments.haproxy.settings import EdgeSettings
from tests.deployments.haproxy.edge import running

SECONDS = 1


async def test_silent_streams_live_and_stuck_clients_go() -> None:
    """A limit on idle clients that cuts every stream with a long prompt, or none that would let a
    client that does not read, or send, hold a connection for an hour."""
    cut_off = asyncio.Event()

    async def router(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/-/healthz" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            if b"/flood" in head:
                while True:
                    writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                    await writer.drain()
            for _ in range(2):
                await asyncio.sleep(2 * SECONDS)
                writer.write(b"1\r\nx\r\n")
            writer.write(b"0\r\n\r\n")
        except ConnectionError:
            cut_off.set()
        finally:
            writer.close()

    async def open_(data: bytes, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(data)
        return reader, writer

    server = await asyncio.start_server(router, "127.0.0.1", 0)
    behind = server.sockets[0].getsockname()[1]
    with running(EdgeSettings(), [behind], client_seconds=SECONDS) as edge:
        port = edge.port
        silent, first = await open_(b"GET /silent HTTP/1.1\r\nHost: x\r\n\r\n", port)
        sending, two = await open_(b"GET /head HTTP/1.1\r\nHo", port)
        _, three = await open_(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n", port)
        assert b" 408 " in await asyncio.wait_for(sending.read(), 4 * SECONDS)
        await asyncio.wait_for(cut_off.wait(), 6 * SECONDS)
        assert (await asyncio.wait_for(silent.readuntil(b"0\r\n\r\n"), 10)).count(b"x\r\n") == 2
        for writer in (first, two, three):
            writer.close()
    server.close()
