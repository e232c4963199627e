"""ApiContext: the state and the settings that the handlers of one application share."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deployments.adapters.record_store import AdapterRecord
from deployments.api.caller import Caller
from deployments.api.fields.body import StructBody, T
from deployments.api.generation.tenancy import QueuePlace
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange, decoded
from deployments.api.http.json_body import JsonObject, in_thread, parse_json
from deployments.api.options import ApiOptions
from deployments.api.served_model import allowed, find_model, known_model
from deployments.api.stream.background import BackgroundRuns
from deployments.api.stream.response_store import ResponseStore
from deployments.backend import Backend, ModelCard
from engine.errors import MantaError

_IMAGE_SETTING = "images.body_bytes"
_BODY_STEP = 2**20  # bytes reserved in advance while a body of unknown length is read


@dataclass(slots=True)
class RequestCounter:
    """The number of generation requests in flight."""

    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The backend, the options and the state that all handlers of one application share.

    responses: the stored answers of /v1/responses
    background: the answers of /v1/responses that are generated without a connection
    """

    backend: Backend
    options: ApiOptions
    responses: ResponseStore
    counter: RequestCounter = field(default_factory=RequestCounter)
    background: BackgroundRuns = field(default_factory=BackgroundRuns)

    async def read(self, exchange: HttpExchange, *, empty: bool = False) -> JsonObject:
        """Return the body as a JSON object. Raises ApiError 400, 408, 413, 415.

        empty: whether an empty body counts as an object without fields.

        Large bodies are decompressed and parsed off the event loop. A second call returns the same
        object.
        """
        if exchange.parsed is not None:
            return exchange.parsed
        limit, raised = self.options.max_body_bytes, partial(self._raised_limit, exchange)
        data = await exchange.body(limit, self.options.body_timeout_s, raised, empty=empty)
        if exchange.encoding:
            most = (limit, "")
            if self._takes_images():
                most = (self.options.max_image_body_bytes, _IMAGE_SETTING)
            data = await decoded(data, exchange.encoding, *most)
            if len(data) > limit:
                self._raised_limit(exchange, len(data))
        exchange.body_size = len(data)

        def parse() -> Any:
            exchange.digest = hashlib.blake2b(data, digest_size=16).digest()
            return {} if empty and not data else parse_json(data)

        body = await in_thread(parse, len(data))
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object", code="invalid_type")
        exchange.parsed = body
        return body

    def _takes_images(self) -> bool:
        """Whether bodies may exceed max_body_bytes, because a served model takes images and the
        limit for bodies with images is higher.
        """
        options = self.options
        return options.max_image_body_bytes > options.max_body_bytes and any(
            card.images is not None for card in self.backend.models().values()
        )

    def _raised_limit(self, exchange: HttpExchange, size: int) -> tuple[int, str]:
        """Return the limit, in bytes, for a body that exceeds max_body_bytes, and the name of the
        setting of this limit ("": none).

        The body's bytes are reserved in ImageMemory until the request's answer is sent. For a body
        without a Content-Length, memory is reserved step by step, and the limit is the end of the
        present step.
        size: bytes of the body that are known so far.
        Raises Overloaded if ImageMemory has no room.
        """
        if not self._takes_images():
            return self.options.max_body_bytes, ""
        most = self.options.max_image_body_bytes
        if size > most:
            return most, _IMAGE_SETTING
        if exchange.content_length is None:
            size = min(most, size + _BODY_STEP)
        if exchange.held is None:
            exchange.held = self.options.images.memory.take(0)
            exchange.on_end.append(exchange.held.release)
        if size > exchange.held.size:
            exchange.held.add(size - exchange.held.size)
        return size, ""

    async def read_as(
        self, exchange: HttpExchange, body: StructBody[T], *, empty: bool = False
    ) -> T:
        """Return the request's body as the Struct of `body`.

        Raises as `read`, and ApiError 400 naming a field.
        """
        decoded = await self.read(exchange, empty=empty)
        read = partial(body.read, decoded, exchange.ignored, strict=self.options.strict)
        return await in_thread(read, exchange.body_size)

    async def admit(self, place: QueuePlace, name: Any, caller: Caller) -> ModelCard:
        """Check that a request may enter the queue, and return the card of its model.

        place: the request's place in the queue
        name: the model's name in the request

        A full queue is reported before an unknown name. Raises as `Backend.admit` and `find_model`.
        """
        card = known_model(name, self.backend)
        self.backend.admit(place.key, place.priority, "" if card is None else card.id)
        if card is None:
            return await find_model(name, self.backend, caller)
        return allowed(card, caller)

    def count_request(self, exchange: HttpExchange) -> None:
        """Count a request against the limits of its key.

        A request that is refused because too many are in flight is not counted. Raises ApiError
        503 overloaded, 429.
        """
        if self.counter.in_flight >= self.options.max_in_flight:
            raise ApiError(503, "overloaded", "too many requests are in flight", retry_after=1)
        limits = self.options.limits
        if limits is not None and exchange.caller.rule.limited:
            limits.count_request(exchange.caller, time.monotonic(), time.time())

    def charge(self, exchange: HttpExchange, prompts: Sequence[Sequence[int]]) -> None:
        """Charge the tokens of a request's prompts to the limits of its key.

        The answer gets headers with the remaining limits. Raises ApiError 429.
        """
        limits = self.options.limits
        if limits is not None and exchange.caller.rule.limited:
            limits.charge(exchange.caller, sum(map(len, prompts)), time.monotonic())
            exchange.always += limits.headers(exchange.caller)

    async def pin(self, name: str, deadline: float | None) -> AdapterRecord:
        """Return the present record of an adapter, whose revision is known.

        The first request for an adapter waits here until a replica has read the adapter's files.
        deadline: a time in monotonic seconds; None: no limit. Raises MantaError deadline_exceeded.
        """
        try:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            async with asyncio.timeout(seconds):
                return await self.backend.adapters.pin(name)
        except TimeoutError:
            message = "the request's deadline has passed"
            raise MantaError(message, code="deadline_exceeded") from None


# The function of a route: sends the answer itself and returns None, or returns the answer's JSON.
Handler = Callable[[ApiContext, HttpExchange], Awaitable[object]]
