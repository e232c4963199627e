"""BackgroundRuns: answers of /v1/responses that are made without a connection, and the streams of
answers that are kept.

A run's events are recorded in order, each under its sequence_number, so that any number of streams
can begin behind any of them. A run belongs to its router, as kept answers do, and ends with it.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.api.agents.answer import ItemAnswer
from deployments.api.agents.responses_writer import ResponsesWriter
from deployments.api.generation.answer.keepalive import COMMENT, EVENT_STREAM, STREAM_HEADERS
from deployments.api.http.errors import OVERLOADED, ApiError, from_backend, internal, invalid
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.backend import Generation
from engine.errors import MantaError, short_traceback

if TYPE_CHECKING:
    from deployments.api.app import Api

log = logging.getLogger("manta.api")

MAX_RUNS = 128  # at once, of one router


class BackgroundRun:
    """One answer. items: of the conversation before it, for the store."""

    def __init__(
        self, owner: str, answer: ItemAnswer, generation: Generation, items: list[dict[str, Any]]
    ) -> None:
        assert isinstance(answer.writer, ResponsesWriter)
        self.owner, self.items = owner, items
        self.writer = answer.writer
        self.events: list[bytes] = []
        self.size = 0  # bytes of events
        self.ended = False
        self.wanted = True  # False: it was deleted
        self.task: asyncio.Task[None] | None = None
        self._answer, self._generation = answer, generation
        self._more = asyncio.Event()
        self._record()

    def response(self) -> dict[str, Any]:
        return self.writer.whole()

    async def all(self) -> None:
        try:
            await self._answer.run(self._generation, self._record)
        except (ApiError, MantaError) as error:
            self._fail(error if isinstance(error, ApiError) else from_backend(error))
        except Exception as error:
            log.error("the response %s failed: %s", self.writer.id, short_traceback(error))
            self._fail(internal())
        finally:
            self._generation.abort()
            if not self.ended:
                self._end()

    def cancel(self) -> None:
        """Nothing more is generated. Once more it does nothing."""
        if not self.ended:
            self._generation.abort()
            self.writer.cancel()
            self._end()
            if self.task is not None:
                self.task.cancel()

    def _fail(self, error: ApiError) -> None:
        if not self.ended:  # an end that was wanted may look like a failure
            self.writer.fail(error)

    def _end(self) -> None:
        self.ended = True
        self._record()

    def _record(self) -> bool:
        """Whether there may be more."""
        new = self._answer.take_events()
        self.events += new
        self.size += sum(map(len, new))
        self._more.set()
        self._more = asyncio.Event()
        return not self.ended

    async def some(self, seconds: float | None) -> bool:
        """Whether another event comes, or the end, within so long."""
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
        """Raises ApiError 503 overloaded."""
        held = sum(run.size for run in self._runs.values())
        if len(self._runs) >= MAX_RUNS or held > most_bytes:
            raise ApiError(
                503,
                "overloaded",
                f"{len(self._runs)} responses run in the background, with {held} bytes of events",
                kind=OVERLOADED,
                headers=(("retry-after", "5"),),
            )

    def get(self, id: str, owner: str) -> BackgroundRun | None:
        run = self._runs.get(id)
        return run if run is not None and run.owner == owner else None

    def start(self, run: BackgroundRun, api: "Api") -> None:
        id = run.writer.id
        self._runs[id] = run

        api.in_flight += 1

        def ended(_: asyncio.Task[None]) -> None:
            api.in_flight -= 1
            del self._runs[id]
            if run.wanted:
                api.responses.put(id, run.owner, run.response(), run.items, run.events)

        run.task = asyncio.create_task(run.all())
        run.task.add_done_callback(ended)


async def stream_run(
    exchange: HttpExchange, run: BackgroundRun, after: int, keepalive: float
) -> None:
    """The events behind `after`, and those that come, until the answer ends. A client that leaves
    does not end it."""
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
            if idle and not await run.some(keepalive or None):
                await exchange.write(COMMENT)


async def stream_kept(exchange: HttpExchange, events: list[bytes], after: int) -> None:
    await exchange.start(EVENT_STREAM, STREAM_HEADERS)
    await exchange.write(b"".join(events[after + 1 :]), more=False)


def take_after(query: dict[str, str]) -> int:
    """starting_after of a query: the last event that the client has; -1 without one. Raises
    ApiError 400."""
    given = query.get("starting_after")
    if given is None:
        return -1
    if not given.isdecimal() or len(given) > 9:
        raise invalid("starting_after must be a sequence_number", "starting_after")
    return int(given)


def events_of(response: dict[str, Any]) -> list[bytes]:
    """The events of an answer that was not recorded: each text in one piece. The same for each
    call, so that a stream can go on behind any of them."""
    return [
        b"event: %b\ndata: %b\n\n"
        % (name.encode(), msgspec.json.encode({"type": name, "sequence_number": i, **fields}))
        for i, (name, fields) in enumerate(_told(response))
    ]


def _told(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {
        **response,
        **dict.fromkeys(("completed_at", "incomplete_details", "error", "usage")),
        "status": "in_progress",
        "output": [],
    }
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        value = next((name for name in ("arguments", "input", "content") if name in item), "")
        empty: Any = [] if value == "content" else ""
        opened = {**item, value: empty}
        if "status" in item:
            opened["status"] = "in_progress"
        yield "response.output_item.added", {"output_index": index, "item": opened}
        about = {"item_id": item["id"], "output_index": index}
        if value == "content":
            for place, part in enumerate(item["content"]):
                yield from _told_part({**about, "content_index": place}, part)
        elif value:
            kind = "function_call_arguments" if value == "arguments" else "custom_tool_call_input"
            if item[value]:
                yield f"response.{kind}.delta", {**about, "delta": item[value]}
            ending = {**about, "name": item["name"], value: item[value]}
            yield f"response.{kind}.done", ending
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _told_part(about: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    text, kind = part["text"], part["type"]
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    nothing = {**part, "text": "", **({"logprobs": []} if more else {})}
    yield "response.content_part.added", {**about, "part": nothing}
    if text:
        yield f"response.{kind}.delta", {**about, "delta": text, **more}
    yield f"response.{kind}.done", {**about, "text": text, **more}
    yield "response.content_part.done", {**about, "part": part}
