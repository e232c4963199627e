"""uvicorn in a thread of this process, on a free port of the loopback."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def serve(app: Any, http: Any = "httptools", seconds: float = 10.0) -> Iterator[int]:
    """Serve an ASGI application by uvicorn in a thread; yields the port.

    http: "httptools" (what Serve uses), "h11" or a protocol class.
    seconds: time limit of the application's start.
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", http=http, loop="asyncio", lifespan="auto")
    server = uvicorn.Server(config)
    started = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(seconds)
    try:
        yield listener.getsockname()[1]
    except BaseException:  # stop at once, cutting open streams, so that this error is reported
        server.should_exit = server.force_exit = True
        thread.join(10)
        raise
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
