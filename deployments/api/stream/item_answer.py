"""ItemAnswer: answers that consist of items or blocks, whole or as events; a dialect's writer
creates both.

The events depend only on the answer's tokens, not on their division into deltas. Therefore an
event's id contains only the numbers of tokens and events so far: a resumed stream creates all
events again, and leaves out those that the client has.
"""

import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from deployments.api.generation.call import GenerationCall
from deployments.api.http.errors import ApiError, from_backend
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject, in_thread
from deployments.api.output.chat_output import ParsedChoice, call_id
from deployments.api.output.plan import OutputPlan
from deployments.api.output.step_parser import Event
from deployments.api.stream.event_ids import EventIds
from deployments.api.stream.logprobs import ScoredToken, chat_logprobs
from deployments.api.stream.merge import (
    COMMENT,
    EVENT_STREAM,
    STREAM_HEADERS,
    ChoiceOutput,
    ended_early,
    failed,
    first_items,
)
from deployments.api.stream.replay import WITHOUT_IDS, Resumption, StreamReplay
from deployments.backend import Generation
from engine.errors import MantaError
from engine.messages import Delta
from engine.text.detokenizer import Decoded

_json = msgspec.json.encode


class Usage(msgspec.Struct, frozen=True):
    """The token counts of one answer.

    cached: prompt tokens found in the prefix cache
    reasoning: output tokens of the reasoning
    """

    prompt: int
    output: int
    cached: int
    reasoning: int


def named_event(name: str, fields: JsonObject) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json(fields))


class Wire:
    """The events of one writer, in order.

    frame: returns the bytes of an event, given its name and fields
    new: the events that were not sent yet
    count: the number of all events so far
    """

    def __init__(self, frame: Callable[[str, JsonObject], bytes] = named_event) -> None:
        self._frame = frame
        self.new: list[tuple[str, JsonObject]] = []
        self.count = 0

    def push(self, name: str, fields: JsonObject) -> None:
        self.new.append((name, fields))
        self.count += 1

    def take(self) -> list[bytes]:
        """Return and clear the new events, each as bytes for the stream."""
        events = [self._frame(name, fields) for name, fields in self.new]
        self.new.clear()
        return events


class ItemWriter(Protocol):
    """The interface of a dialect's writer, which creates the events of a stream and the whole
    answer."""

    wire: Wire

    def open(self, usage: Usage) -> None:
        """Begin the answer. usage: the counts known before the first token."""
        return

    def take_event(self, event: Event, logprobs: list[ScoredToken]) -> None: ...

    def end(self, reason: str, stop: str | int | None, usage: Usage) -> None: ...

    def fail(self, error: ApiError) -> None: ...

    def whole(self) -> JsonObject:
        """Return the answer so far."""
        ...


class Naming:
    """The ids of an answer's items, which are the same if the answer is generated again.

    number: the answer's unique number.
    short: whether the model needs tool call ids of nine letters and digits.
    """

    def __init__(self, number: bytes, short: bool) -> None:
        self._number, self._short = number, short

    @classmethod
    def of(cls, call: GenerationCall, number: bytes) -> "Naming":
        """Return the naming of an answer, with tool call ids in the form that the model needs."""
        format = call.output.format if call.output is not None else None
        return cls(number, format is not None and format.short_ids)

    def call(self, index: int, prefix: str = "") -> str:
        """Return a tool call's id. index: the call's index. prefix: the dialect's prefix; "": an id
        in the model's form."""
        return call_id(self._number, 0, index, self._short and not prefix, prefix or "call_")

    def item(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self._number.hex()}{index:04x}"


class _WrittenChoice(ParsedChoice):
    """A ParsedChoice whose events are passed to a writer immediately."""

    def __init__(self, plan: OutputPlan, call: GenerationCall, writer: ItemWriter) -> None:
        super().__init__(plan, call.common.params, call.prompts[0])
        self._writer = writer
        self._call = call

    def feed(self, delta: Delta) -> Decoded:
        if self._call.common.params.logprobs is None or not delta.logprobs:
            decoded = super().feed(delta)
            for event in self.new:
                self._writer.take_event(event, [])
            return decoded
        count = 0
        for i, token in enumerate(delta.token_ids):
            last = i == len(delta.token_ids) - 1
            single = Delta(delta.id, [token], delta.finish if last else "")
            single.stop_token = delta.stop_token if last else None
            decoded = super().feed(single)
            count += decoded.num_tokens
            entries = []
            if self.is_content and self.is_content[0] and single.stop_token is None:
                entries = chat_logprobs(self._call.tokenizer, delta.logprobs[i : i + 1])
            for event in self.new:
                self._writer.take_event(event, entries if event.kind == "content" else [])
                entries = []
            if decoded.finish_reason is not None:
                break
        return Decoded("", decoded.finish_reason, decoded.stop_reason, count)


class ItemAnswer:
    """The answer to a call with one choice, in the format of a dialect's writer."""

    media_type = EVENT_STREAM  # media type of a streamed answer

    def __init__(
        self, call: GenerationCall, writer: ItemWriter, resumed: Resumption = WITHOUT_IDS
    ) -> None:
        ids = resumed.ids
        self.call, self.writer, self.ids = call, writer, ids
        plan = call.output
        if plan is None:
            plan = OutputPlan(call.tokenizer, None, None, "no", None, frozenset())
        self._parsed = _WrittenChoice(plan, call, writer)
        self.choice = ChoiceOutput(call, parsed=self._parsed)
        self._told = 0  # number of events sent to the client
        self._skipping: dict[int, int] = {}
        writer.open(self._usage())
        self._replay: StreamReplay | None = None
        if ids is not None and ids.resumed:
            self._told = ids.told
            self._replay = StreamReplay(call, ids, [self.choice], resumed.past)
            self._skipping = self._replay.skipping
            call.emitted = [self._replay.emitted]
            if self.choice.finish_reason is not None:
                self._end()

    async def collect(self, generation: Generation) -> bytes:
        """Wait for the end and return the JSON body. Raises ApiError, MantaError."""
        while self.choice.finish_reason is None:
            for delta in await _some(generation):
                self._feed(delta, generation)
        return await in_thread(lambda: _json(self.writer.whole()), self.choice.decoder.num_tokens)

    async def stream(
        self, generation: Generation, exchange: HttpExchange, keepalive: float
    ) -> None:
        """Write server-sent events until the end.

        A failure before the first event is an ordinary error answer. A later failure is an event of
        the answer's dialect.
        Raises ApiError or MantaError before the start, ClientDisconnected at any time.
        """
        try:
            deltas: list[Delta] = []
            if self.choice.finish_reason is None:
                deltas = [d for _, d in await first_items(generation, exchange, keepalive)]
                if not deltas:
                    raise ended_early()
            if not exchange.started:
                await exchange.start(self.media_type, STREAM_HEADERS)
            spoke = time.monotonic()
            while True:
                for delta in deltas:
                    self._feed(delta, generation)
                ended = self.choice.finish_reason is not None
                if (data := self._lines()) or ended:
                    await exchange.write(data, more=not ended)
                elif self._skipping and keepalive and time.monotonic() > spoke + keepalive:
                    await exchange.write(COMMENT)
                    spoke = time.monotonic()
                if ended:
                    return
                deltas = await _some(generation)
        except (ApiError, MantaError) as error:
            if not exchange.started:
                raise
            self.writer.fail(from_backend(error))
            await exchange.write(self._lines(), more=False)

    async def run(self, generation: Generation, tell: Callable[[], bool]) -> None:
        """Process the generation until its end, without a connection. Raises ApiError, MantaError.

        tell: called when there may be new events; returns False to stop
        """
        while self.choice.finish_reason is None:
            deltas = await _some(generation)
            if not tell():
                return
            for delta in deltas:
                self._feed(delta, generation)
            tell()

    def take_events(self) -> list[bytes]:
        """Return and clear the new events, each as bytes for an event stream."""
        return self.writer.wire.take()

    def _feed(self, delta: Delta, generation: Generation) -> None:
        choice, ids = self.choice, self.ids
        if choice.finish_reason is not None:
            return
        if delta.finish == "abort":
            # These dialects have no finish reason for an aborted answer, so it is an error.
            raise failed(delta)
        if self._skipping:
            assert self._replay is not None
            delta, decoded = self._replay.skip(0, choice, delta)
        else:
            decoded = choice.feed(delta)
        ended = decoded.finish_reason is not None
        if ids is not None:
            ids.took(0, delta.token_ids[: decoded.num_tokens], choice.cached, ended)
        if ended:
            self._end()
            if not delta.finish:
                generation.abort()

    def _end(self) -> None:
        choice = self.choice
        self.writer.end(choice.finish_reason or "stop", choice.stop_reason, self._usage())

    def _usage(self) -> Usage:
        shown = None if self.ids is None or not self.ids.shown else self.ids.shown[0]
        return Usage(
            prompt=sum(map(len, self.call.prompts)),
            output=self._parsed.decoder.num_tokens,
            cached=shown.cached if shown is not None and shown.tokens else self.choice.cached,
            reasoning=self._parsed.reasoning_tokens,
        )

    def _lines(self) -> bytes:
        """Return the bytes of the events that the client has not received."""
        wire, ids = self.writer.wire, self.ids
        out = []
        before = wire.count - len(wire.new)
        for number, event in enumerate(wire.take(), before + 1):
            if number <= self._told:
                continue
            self._told = number
            if ids is not None:
                ids.tell(number)
                out.append(ids.line())
            out.append(event)
        return b"".join(out)


def new_number(ids: EventIds | None) -> tuple[bytes, int]:
    """Return an answer's unique number (12 bytes) and its creation time in Unix seconds.

    ids: the event ids from which both are taken; None: a random number, and the present time.
    """
    if ids is None:
        return secrets.token_bytes(12), int(time.time())
    return ids.number, ids.created


async def _some(generation: Generation) -> list[Delta]:
    items = await generation.next()
    if not items:
        raise ended_early()
    return [delta for _, delta in items]
