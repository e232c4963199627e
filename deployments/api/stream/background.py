"""BackgroundRuns: answers of /v1/responses that are generated without a connection.

A run's events are recorded in order of their sequence_number, so that any number of streams can
start after any event. A run exists only in its router, like stored answers (response_store.py), and
ends with that router.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from deployments.api.http.errors import ApiError, from_backend, internal
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.http.json_body import JsonObject
from deployments.api.stream.item_answer import ItemAnswer, ItemWriter
from deployments.api.stream.merge import COMMENT, EVENT_STREAM, STREAM_HEADERS
from deployments.backend import Generation
from engine.errors import MantaError, short_traceback

log = logging.getLogger("manta.api")

MAX_RUNS = 128  # maximum number of concurrent runs in one router


class CancellableWriter(ItemWriter, Protocol):
    """The interface of a writer whose answer has an id and can be cancelled."""

    @property
    def id(self) -> str: ...

    def cancel(self) -> None: ...


class BackgroundRun:
    """An answer that is generated without a connection.

    items: the conversation before the answer, for the store
    """

    def __init__(
        self,
        owner: str,
        answer: ItemAnswer,
        writer: CancellableWriter,
        generation: Generation,
        items: list[JsonObject],
    ) -> None:
        self.owner, self.items = owner, items
        self.writer = writer
        self.events: list[bytes] = []
        self.size = 0  # bytes of events
        self.ended = False
        # Whether the answer is to be stored at its end; false if the client has deleted it.
        self.wanted = True
        self.task: asyncio.Task[None] | None = None
        self._answer, self._generation = answer, generation
        self._more = asyncio.Event()
        self._record()

    def response(self) -> JsonObject:
        return self.writer.whole()

    async def all(self) -> None:
        try:
            await self._answer.run(self._generation, self._record)
        except (ApiError, MantaError) as error:
            self._fail(from_backend(error))
        except Exception as error:
            log.error("the response %s failed: %s", self.writer.id, short_traceback(error))
            self._fail(internal())
        finally:
            self._generation.abort()
            if not self.ended:
                self._end()

    def cancel(self) -> None:
        """Cancel the generation. Idempotent."""
        if not self.ended:
            self._generation.abort()
            self.writer.cancel()
            self._end()
            if self.task is not None:
                self.task.cancel()

    def _fail(self, error: ApiError) -> None:
        if not self.ended:
            # After a cancellation the run has ended, and the error is only a consequence.
            self.writer.fail(error)

    def _end(self) -> None:
        self.ended = True
        self._record()

    def _record(self) -> bool:
        """Record the answer's new events and wake the readers; return whether more events may
        follow."""
        new = self._answer.take_events()
        self.events += new
        self.size += sum(map(len, new))
        self._more.set()
        self._more = asyncio.Event()
        return not self.ended

    async def wait_for_event(self, seconds: float | None) -> bool:
        """Wait for new events or the end; return False if there was neither in time.

        seconds: the longest wait; None: no limit.
        """
        more = self._more
        try:
            async with asyncio.timeout(seconds):
                await more.wait()
        except TimeoutError:
            return False
        return True


class BackgroundRuns:
    """The runs of one router that have not ended, by the id of their response."""

    def __init__(self) -> None:
        self._runs: dict[str, BackgroundRun] = {}

    def check_room(self, most_bytes: int) -> None:
        """Check that another run may start: at most MAX_RUNS, with at most most_bytes of events in
        all.

        Raises ApiError 503 overloaded.
        """
        held = sum(run.size for run in self._runs.values())
        if len(self._runs) >= MAX_RUNS or held > most_bytes:
            raise ApiError(
                503,
                "overloaded",
                f"{len(self._runs)} responses run in the background, with {held} bytes of events",
                retry_after=5,
            )

    def get(self, id: str, owner: str) -> BackgroundRun | None:
        run = self._runs.get(id)
        return run if run is not None and run.owner == owner else None

    def start(self, run: BackgroundRun, on_end: Callable[[], None]) -> None:
        """Generate the answer of a run in a task of its own.

        on_end: called once, at the answer's end
        """
        id = run.writer.id
        self._runs[id] = run

        def ended(_: asyncio.Task[None]) -> None:
            del self._runs[id]
            on_end()

        run.task = asyncio.create_task(run.all())
        run.task.add_done_callback(ended)


async def stream_run(
    exchange: HttpExchange, run: BackgroundRun, after: int, keepalive: float
) -> None:
    """Stream a run's recorded and future events after event number `after`, until the answer ends.
    A client's disconnect does not end the generation."""
    await exchange.start(EVENT_STREAM, STREAM_HEADERS)
    async with UntilDisconnect(exchange.receive, lambda: None):
        while True:
            new, ended = run.events[after + 1 :], run.ended
            after += len(new)
            if new or ended:
                await exchange.write(b"".join(new), more=not ended)
            if ended:
                return
            idle = len(run.events) <= after + 1 and not run.ended
            if idle and not await run.wait_for_event(keepalive or None):
                await exchange.write(COMMENT)
