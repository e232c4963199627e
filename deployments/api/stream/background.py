"""BackgroundRuns: answers of /v1/responses that are generated without a connection.

A run's events are recorded in order, each under its sequence_number, so that any number of streams
can begin after any of them. A run belongs to its router, as kept answers (response_store.py) do,
and ends with it.
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

MAX_RUNS = 128  # runs at once in one router


class CancellableWriter(ItemWriter, Protocol):
    """A writer whose answer has an id and can be cancelled."""

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
        # Whether the answer is stored at its end; it is not if it was deleted.
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
        """End the generation. A second call does nothing."""
        if not self.ended:
            self._generation.abort()
            self.writer.cancel()
            self._end()
            if self.task is not None:
                self.task.cancel()

    def _fail(self, error: ApiError) -> None:
        if not self.ended:
            # After a cancellation, which has ended the run, the error is only its consequence.
            self.writer.fail(error)

    def _end(self) -> None:
        self.ended = True
        self._record()

    def _record(self) -> bool:
        """Store the answer's new events for readers and wake them; return whether more may come."""
        new = self._answer.take_events()
        self.events += new
        self.size += sum(map(len, new))
        self._more.set()
        self._more = asyncio.Event()
        return not self.ended

    async def wait_for_event(self, seconds: float | None) -> bool:
        """Wait for another event or the end; return whether one came in time.

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
        """Refuse another run beyond MAX_RUNS, or while the runs hold more than most_bytes.

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

        on_end: called once, when the answer has ended
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
    """Stream a run's events after event number `after`, future ones included, until the answer
    ends. A client that leaves does not end the generation."""
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
