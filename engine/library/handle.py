"""RequestHandle: one request in flight, read from threads or from asyncio.

The thread that receives the engine's frames writes to the handle; any thread or event loop may
read.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from types import EllipsisType
from typing import Any

from engine.errors import MantaError, RequestReleased
from engine.library.outputs import RequestOutput, RequestStatus
from engine.library.progress import RequestProgress
from engine.messages import Delta

# returns output, None at the end, or `...` if there is no output yet
Find = Callable[[], RequestOutput | EllipsisType | None]
Wake = Callable[[], None]


class RequestHandle:
    """A request that was started by `start_request` of an `LLM` or `AsyncEngine`.

      for out in handle: ...          blocking, the new output       get, get_nowait
      async for out in handle: ...    the same for asyncio
      handle.sync()                   blocking, the whole request
      await handle                    the same for asyncio
      with handle: ...                releases it at the end

    Blocking calls must not be made on the event loop of an AsyncEngine. After ``release`` all other
    methods raise RequestReleased. Waiting calls raise EngineDead if the engine process ends first;
    earlier output can still be read. A wait that ends early (timeout, cancellation) leaves the
    request running.
    """

    def __init__(
        self, progress: RequestProgress, ids: Sequence[int], abort: Callable[[list[int]], None]
    ) -> None:
        """Create the handle of a request.

        ids: the engine's id of each choice.
        abort: aborts open choices by their ids; each then ends with an "abort" delta.
        """
        self._progress: RequestProgress | None = progress  # None after `release`
        self._ids = ids
        self._abort = abort
        self._error: MantaError | None = None
        self._lock = threading.Lock()
        # wake function of each waiting reader -> the reader's `Find`
        self._waits: dict[Wake, Find] = {}

    # Called by `RequestManager`, which started the request.

    def _push(self, choice: int, delta: Delta, version: str = "") -> bool:
        """Add a choice's delta; return whether a stop string ended the choice, which the engine
        must then abort.

        version: the version of the weights that sampled the delta's tokens.
        """
        with self._lock:
            if self._progress is None:
                return False
            cut = self._progress.push_delta(choice, delta, version)
            self._wake()
            return cut

    def _fail(self, error: MantaError) -> None:
        """End the request with an error; no more deltas will come."""
        with self._lock:
            if self._progress is not None and self._progress.running and self._error is None:
                self._error = error
                self._wake()

    # Called by the user of the library.

    def status(self) -> RequestStatus:
        with self._lock:
            progress = self._unreleased()
            return RequestStatus.INTERRUPTED if self._error else progress.status()

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Wait for new output and return it; None once all output of an ended request was returned.

        Raises TimeoutError after timeout seconds.
        """
        return self._block(self._news, timeout)

    def get_nowait(self) -> RequestOutput | None:
        """Return the new output without waiting; None if there is none."""
        with self._lock:
            out = self._news()
        return None if out is ... else out

    def sync(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the whole output, without effect on later calls of `get`.

        Raises TimeoutError after timeout seconds.
        """
        out = self._block(self._whole, timeout)
        assert out is not None
        return out

    def stop(self) -> None:
        """Cancel the request; its output so far stays readable.

        The engine frees the request's memory in its next step.
        """
        with self._lock:
            choices = self._unreleased().open()
        self._abort([self._ids[choice] for choice in choices])

    def release(self) -> None:
        """Cancel the request if it runs, and free its memory. Idempotent; other calls then
        raise."""
        with self._lock:
            progress, self._progress = self._progress, None
            self._wake()
        if progress is not None:
            self._abort([self._ids[choice] for choice in progress.open()])

    def __enter__(self) -> "RequestHandle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __iter__(self) -> Iterator[RequestOutput]:
        while (out := self.get()) is not None:
            yield out

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while (out := await self._wait(self._news)) is not None:
            yield out

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        out = yield from self._wait(self._whole).__await__()
        assert out is not None
        return out

    # Waiting: `find` is called with the lock held, and again after each wake.

    def _block(self, find: Find, timeout: float | None) -> RequestOutput | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            gate = threading.Event()
            if (output := self._ask(find, gate.set)) is not ...:
                return output
            try:
                if not gate.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TimeoutError(f"still waiting after {timeout} s")
            except BaseException:
                self._forget(gate.set)
                raise

    async def _wait(self, find: Find) -> RequestOutput | None:
        loop = asyncio.get_running_loop()
        while True:
            future = loop.create_future()
            wake = partial(_resolve, loop, future)
            if (output := self._ask(find, wake)) is not ...:
                return output
            try:
                await future
            except BaseException:
                self._forget(wake)
                raise

    def _ask(self, find: Find, wake: Wake) -> RequestOutput | EllipsisType | None:
        """Return the output of `find`; if there is none yet, register `wake` and return `...`."""
        with self._lock:
            output = find()
            if output is ...:
                self._waits[wake] = find
            return output

    def _forget(self, wake: Wake) -> None:
        with self._lock:
            self._waits.pop(wake, None)

    # The methods below are called with the lock held.

    def _wake(self) -> None:
        if not self._waits:
            return
        over = self._progress is None or self._progress.running == 0 or self._error is not None
        for wake, find in list(self._waits.items()):
            if over or find == self._news:
                del self._waits[wake]
                wake()

    def _unreleased(self) -> RequestProgress:
        if self._progress is None:
            raise RequestReleased("the request was released")
        return self._progress

    def _news(self) -> RequestOutput | EllipsisType | None:
        progress = self._unreleased()
        out = progress.take_output()
        if out is None and self._error is not None:
            raise self._error
        return ... if out is None and progress.running else out

    def _whole(self) -> RequestOutput | EllipsisType:
        progress = self._unreleased()
        if self._error is not None:
            raise self._error
        return ... if progress.running else progress.all()


def _resolve(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]") -> None:
    """Resolve a future of the event loop, from any thread."""
    if asyncio._get_running_loop() is not loop:
        with contextlib.suppress(RuntimeError):  # raised if the loop is closed
            loop.call_soon_threadsafe(_set, future)
    else:
        _set(future)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
