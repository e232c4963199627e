"""VirtualLoop: an event loop whose clock jumps to the next timer, so that minutes of real service
code run in seconds, and reproducibly.

Connections on the loop are pairs of in-memory transports, on which bytes arrive after `HOP`
seconds. `run` replaces `time.monotonic`, which the service's code reads, by the loop's clock.
"""

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

HOP = 0.0005  # seconds that bytes take from one end of a connection to the other


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time and return its result.

    The coroutine must not wait for a thread, a process or a real socket.
    """
    real = time.monotonic
    loop = VirtualLoop()
    time.monotonic = loop.time
    try:
        return loop.run_until_complete(main)
    finally:
        time.monotonic = real
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class _Selector(selectors.SelectSelector):
    """A selector that advances its clock by the timeout instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0  # seconds; not 0, which means "never" in some fields

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits and no timer will end it"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        self._listeners: dict[int, Callable[[], asyncio.Protocol]] = {}
        self._ports = count(1)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    async def create_server(self, factory: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        port = next(self._ports)
        self._listeners[port] = factory
        return _Server(self._listeners, port)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, _: Any = None, port: Any = 0, **__: Any
    ) -> Any:
        listener = self._listeners.get(port)
        if listener is None:
            raise ConnectionRefusedError(f"nothing listens on port {port}")
        ours, theirs = factory(), listener()
        near, far = _Transport(self, ours), _Transport(self, theirs)
        near.peer, far.peer = far, near
        theirs.connection_made(far)
        ours.connection_made(near)
        return near, ours


class _Server:
    def __init__(self, listeners: dict[int, Any], port: int) -> None:
        self.sockets = [self]
        self._listeners, self._port = listeners, port

    def getsockname(self) -> tuple[str, int]:
        return "memory", self._port

    def close(self) -> None:
        self._listeners.pop(self._port, None)


class _Transport(asyncio.Transport):
    """One end of a connection. It delivers bytes in order; bytes in flight when an end closes
    are lost.
    """

    peer: "_Transport"

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop, self._protocol, self._closed = loop, protocol, False
        self._coming: deque[bytes] = deque()

    def write(self, data: Any) -> None:
        if not self._closed:
            # Timers for the same time run in any order, so each timer delivers the oldest bytes.
            self.peer._coming.append(bytes(data))
            self._loop.call_later(HOP, self.peer._arrives)

    def _arrives(self) -> None:
        data = self._coming.popleft()
        if not self._closed:
            self._protocol.data_received(data)

    def abort(self) -> None:
        self._ends()
        self._loop.call_later(HOP, self.peer._ends)

    close = abort

    def _ends(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default
