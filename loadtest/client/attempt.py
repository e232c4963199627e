"""RequestAttempt: a request in flight, which parses its answer and ends as a RequestRecord."""

from collections.abc import Callable
from typing import Any

import msgspec

from loadtest.http import HttpConnection
from loadtest.measure.records import RequestRecord
from loadtest.measure.verify import ReceivedAnswer
from loadtest.scenario.requests import RequestSpec
from loadtest.scenario.schedule import PhasePlan


class _Timing(msgspec.Struct):
    """The timing in Manta's `usage`, returned for requests with the header x-return-timing."""

    queue_ms: float | None = None
    migrations: int | None = None
    replicas: list[str] = []

    @classmethod
    def of(cls, value: Any) -> "_Timing":
        """Parse the field `timing` of `usage`; the result is empty if the field has another
        server's format."""
        try:
            return cls() if value is None else msgspec.convert(value, cls)
        except msgspec.ValidationError:
            return cls()


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
    timing: Any = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Logprobs(msgspec.Struct):
    content: list[Any] | None = None
    tokens: list[Any] | None = None


class _ResponseChoice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _ResponsePart(msgspec.Struct):
    choices: list[_ResponseChoice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_ResponsePart).decode


class RequestAttempt:
    """The ResponseHandler of one request, which creates its RequestRecord.

    on_done(attempt, record, answer or None) is called exactly once.
    """

    __slots__ = (
        "_answer",
        "_body",
        "_cancelled",
        "_chunks",
        "_done",
        "_error",
        "_exact",
        "_finish",
        "_headers",
        "_on_done",
        "_origin",
        "_sse",
        "_usage",
        "connect_s",
        "connection",
        "index",
        "intended",
        "last_byte",
        "plan",
        "sent",
        "session",
        "spec",
        "status",
        "t_first",
    )

    def __init__(
        self,
        plan: PhasePlan,
        index: int,
        session: int | None,
        spec: RequestSpec,
        intended: float,
        sent: float,
        origin: float,
        on_done: Callable[["RequestAttempt", RequestRecord, ReceivedAnswer | None], None],
        keep_answer: bool,
    ) -> None:
        """Begin an attempt.

        intended, sent, origin: times of the client's clock; the record's times count from origin.
        """
        self.plan, self.index, self.session, self.spec = plan, index, session, spec
        self.intended, self.sent = intended, sent
        self._origin, self._on_done = origin, on_done
        self.connection: HttpConnection | None = None
        self.connect_s = 0.0
        self.last_byte = sent
        self.t_first: float | None = None
        self.status = 0
        self._headers: dict[bytes, bytes] = {}
        self._sse = False
        self._body = b""
        self._chunks: list[tuple[float, int]] = []
        self._exact = True
        self._usage: _Usage | None = None
        self._finish: str | None = None
        self._error: tuple[str, str | None, str | None] | None = None
        self._done = False
        self._cancelled = False
        self._answer = ReceivedAnswer() if keep_answer else None

    @property
    def first_token(self) -> float | None:
        """The seconds from the intended send time to the first tokens."""
        return self._chunks[0][0] - self.intended if self._chunks else None

    @property
    def retry_after_s(self) -> float:
        """The seconds in the header Retry-After; 0 without it, or where it has a date."""
        try:
            return max(0.0, float(self._headers.get(b"retry-after", b"0")))
        except ValueError:
            return 0.0

    # Called by the connection.

    def on_head(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        self.status, self._headers = status, headers
        self.t_first = self.last_byte = now
        self._sse = headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def on_body(self, data: bytes, now: float) -> None:
        self.last_byte = now
        if not self._sse or self.status != 200:
            self._body += data
            return
        data = self._body + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._body = data.split(b"\n\n")
        for event in events:
            self._event(event, now)
        limit = self.spec.cancel_chunks
        if limit is not None and len(self._chunks) >= limit and not self._done:
            self.cancel(now)

    def on_end(self, now: float) -> None:
        if self.status != 200:
            self._refused()
        elif self._sse:
            if self._error is None and not (self._done and self._finish):
                what = "[DONE]" if not self._done else "a finish_reason"
                self._error = "cut", None, f"the stream ended without {what}"
        elif self.spec.stream:
            kind = self._headers.get(b"content-type", b"").decode("latin-1")
            self._error = "bad_answer", None, f"{kind!r} instead of an event stream"
        else:
            self._unary(now)
        self._finished(now)

    def on_lost(self, error: str, now: float) -> None:
        whole = self._sse and self._done and self._finish  # clients stop reading at [DONE]
        if self._error is None and not whole:
            if error.startswith("not HTTP"):
                kind = "bad_answer"
            else:
                kind = "cut" if self.status else "disconnect"
            self._error = kind, None, error
        self._finished(now)

    # Called by the client.

    def fail(self, kind: str, message: str, now: float) -> None:
        """End the attempt with an error, whatever its state."""
        self._error = kind, None, message
        self._hang_up()
        self._finished(now)

    def cancel(self, now: float) -> None:
        self._cancelled = True
        self._hang_up()
        self._finished(now)

    def _hang_up(self) -> None:
        if self.connection is not None:
            self.connection.abandon()

    # Parsing of the answer.

    def _event(self, event: bytes, now: float) -> None:
        if event.startswith(b"data: ") and b"\n" not in event:
            payload = event[6:]
        else:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return  # a comment, sent to keep proxies from closing the stream
            payload = b"\n".join(lines)
        if payload == b"[DONE]":
            self._done = True
            return
        try:
            part = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._error = self._error or ("bad_answer", None, f"in the stream: {error}")
            return
        if part.error is not None:
            self._error = self._error or ("stream_error", *_code_and_message(part.error))
            return
        self._take_part(part, now)

    def _unary(self, now: float) -> None:
        try:
            part = _decode(self._body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._error = "bad_answer", None, str(error)
            return
        if part.error is not None:
            self._error = ("bad_answer", *_code_and_message(part.error))
        elif not part.choices:
            self._error = "bad_answer", None, "an answer without choices"
        else:
            self._take_part(part, now)

    def _take_part(self, part: _ResponsePart, now: float) -> None:
        known: int | None = None
        if part.usage is not None:
            before = self._usage.completion_tokens if self._usage else 0
            if part.choices and part.usage.completion_tokens is not None and self.spec.stream:
                known = part.usage.completion_tokens - (before or 0)
            self._usage = part.usage
        tokens = 0
        for choice in part.choices:
            message = choice.delta or choice.message
            text = choice.text or (message.content if message else None) or ""
            if choice.finish_reason is not None:
                self._finish = choice.finish_reason
            if choice.token_ids is not None:
                tokens += len(choice.token_ids)
            elif known is None and choice.logprobs is not None:
                tokens += len(choice.logprobs.content or choice.logprobs.tokens or ())
            elif known is None and (text or (message is not None and _other(message))):
                tokens += 1
                self._exact = False
            if self._answer is not None:
                self._answer.add_chunk(text, choice.token_ids)
        if known is not None and not any(c.token_ids is not None for c in part.choices):
            tokens = known
        if tokens > 0:
            self._chunks.append((now, tokens))

    def _refused(self) -> None:
        status = self.status
        try:
            code_and_message = _code_and_message(_decode(self._body).error)
        except (msgspec.DecodeError, UnicodeDecodeError):
            code_and_message = None, self._body[:200].decode("utf-8", "replace")
        if status in (429, 503):
            kind = f"http_{status}"
        elif 400 <= status < 600:
            kind = f"http_{status // 100}xx"
        else:
            kind = "bad_answer"
        self._error = (kind, code_and_message[0], code_and_message[1] or f"status {status}")

    def _finished(self, now: float) -> None:
        if self._error is None and not self._cancelled and self._finish in ("error", "abort"):
            self._error = "stream_error", None, f"finish_reason {self._finish}"
        self._on_done(self, self._record(now), self._answer)

    def _record(self, now: float) -> RequestRecord:
        origin, spec, usage = self._origin, self.spec, self._usage
        counted = sum(tokens for _, tokens in self._chunks)
        reported = usage.completion_tokens if usage else None
        if not spec.stream and reported is not None and self._chunks:
            self._chunks = [(self._chunks[0][0], reported)]
        if not spec.stream:
            self._exact = self._exact or reported is not None
        missing = doubled = 0
        if self._error is None and not self._cancelled:
            received = counted if self._exact and spec.stream else (reported or counted)
            promised = reported if reported is not None else received
            if spec.expected is not None:
                promised = max(promised, spec.expected)
            missing, doubled = max(0, promised - received), max(0, received - promised)
        error = self._error or (None, None, None)
        details = (usage.prompt_tokens_details or {}) if usage else {}
        cached = details.get("cached_tokens")
        timing = _Timing.of(usage.timing if usage else None)
        # the second header is TGI's
        queue_s = _milliseconds(timing.queue_ms or self._headers.get(b"x-queue-time"))
        return RequestRecord(
            index=self.index,
            phase=self.plan.phase.name,
            intended_s=round(self.intended - origin, 6),
            sent_s=round(self.sent - origin, 6),
            connect_s=round(self.connect_s, 6),
            first_byte_s=None if self.t_first is None else round(self.t_first - origin, 6),
            chunks=[(round(t - origin, 6), tokens) for t, tokens in self._chunks],
            chunks_exact=self._exact,
            end_s=round(now - origin, 6),
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=cached if isinstance(cached, int) else None,
            output_tokens_expected=spec.expected,
            output_tokens=counted if reported is None else reported,
            finish_reason=self._finish,
            status=self.status,
            error_class=error[0],
            error_code=error[1],
            error_message=error[2][:300] if error[2] else None,
            request_id=_text(self._headers.get(b"x-request-id")),
            tenant=spec.tenant,
            adapter=spec.adapter,
            session=self.session,
            stream=spec.stream,
            cancelled=self._cancelled and self._error is None,
            slow_reader=spec.slow_pause is not None,
            warmup=self.plan.phase.warmup,
            migrations=timing.migrations,
            queue_s=queue_s,
            replica=timing.replicas[-1] if timing.replicas else None,
            missing_tokens=missing,
            doubled_tokens=doubled,
        )


def _other(message: _Message) -> bool:
    """Whether a message has reasoning or tool calls, whose tokens are not content."""
    return bool(message.reasoning_content or message.reasoning or message.tool_calls)


def _code_and_message(error: Any) -> tuple[str | None, str | None]:
    """Return (code, message) of an error object, in any of the forms that servers use."""
    if not isinstance(error, dict):
        return None, None if error is None else str(error)
    code = error.get("code") or error.get("type")
    message = error.get("message")
    return (None if code is None else str(code)), (None if message is None else str(message))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _milliseconds(value: float | bytes | None) -> float | None:
    try:
        return None if value is None else float(value) / 1000
    except ValueError:
        return None
