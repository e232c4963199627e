"""SpanExporter: sends spans to an OpenTelemetry collector, as OTLP's JSON over HTTP.

Span and TraceContext hold the spans and W3C's trace contexts.

Sources: OTLP 1.x (opentelemetry-proto, "JSON Protobuf Encoding"), W3C Trace Context, level 1.
"""

import asyncio
import logging
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

logger = logging.getLogger("manta.router")

SEND_SECONDS = 2.0  # seconds between two batches
# Maximum number of spans that wait to be sent; further spans are dropped.
MAX_SPANS = 8192
_BATCH = 512
_TIMEOUT = 10.0

INTERNAL, SERVER = 1, 2  # OTLP's numbers for kinds of spans
_ERROR = 2  # OTLP's status code of a failed span

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """The settings of the span exporter, from TracingConfig.

    sample: probability that a new trace is sampled.
    headers: HTTP headers of each request to the collector.
    """

    endpoint: str
    sample: float = 1.0
    service: str = "manta"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A W3C trace context.

    trace: trace id, 32 hex digits.
    parent: id of the parent span, 16 hex digits; "": the trace begins here.
    state: value of the tracestate header.
    """

    trace: str
    parent: str = ""
    sampled: bool = True
    state: str = ""


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the trace context in a request's headers; None if traceparent is missing or invalid."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace, parent, flags, more = match.groups()
    if version == "ff" or not trace.strip("0") or not parent.strip("0"):
        return None
    if version == "00" and more:
        return None
    return TraceContext(trace, parent, bool(int(flags, 16) & 1), tracestate[:512])


def new_context(sample: float) -> TraceContext:
    """Return the context of a new trace. sample: probability that the trace is sampled."""
    return TraceContext(secrets.token_hex(16), sampled=secrets.randbelow(1 << 30) < sample * 2**30)


@dataclass(slots=True)
class Span:
    """A span of a trace.

    start, end: Unix seconds.
    error: error code; "" if the span succeeded.
    """

    name: str
    context: TraceContext
    start: float
    end: float
    kind: int = INTERNAL
    attributes: dict[str, str | int | float | bool | list[str]] = field(default_factory=dict)
    error: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def child(self, name: str, start: float, end: float, **attributes: Any) -> "Span":
        context = TraceContext(self.context.trace, self.id, True, self.context.state)
        dotted = {name.replace("__", "."): value for name, value in attributes.items()}
        return Span(name, context, start, max(start, end), attributes=dotted)

    def to_json(self) -> dict[str, Any]:
        """Return the span in OTLP's JSON encoding."""
        fields: dict[str, Any] = {
            "traceId": self.context.trace,
            "spanId": self.id,
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": str(int(self.start * 1e9)),
            "endTimeUnixNano": str(int(self.end * 1e9)),
            "attributes": _attributes(self.attributes),
        }
        if self.context.parent:
            fields["parentSpanId"] = self.context.parent
        if self.context.state:
            fields["traceState"] = self.context.state
        if self.error:
            fields["status"] = {"code": _ERROR, "message": self.error}
        return fields


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value}


class SpanExporter:
    """An exporter that sends spans in batches from a thread, and drops spans that cannot be sent.

    The first failure of each outage of the collector is logged.

    instance: name of the router. version: version of Manta.
    """

    def __init__(self, settings: TracingSettings, instance: str, version: str) -> None:
        self._url = f"{settings.endpoint.rstrip('/')}/v1/traces"
        self._headers = {"content-type": "application/json", **settings.headers}
        resource = {
            "service.name": settings.service,
            "service.instance.id": instance,
            "service.version": version,
        }
        self._resource = {"attributes": _attributes(resource)}
        self._scope = {"name": "manta", "version": version}
        self._waiting: list[Span] = []
        self._task: asyncio.Task[None] | None = None
        self._away = False
        self.dropped = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._send_on())

    def add_spans(self, spans: list[Span]) -> None:
        if len(self._waiting) + len(spans) > MAX_SPANS:
            self.dropped += len(spans)
        else:
            self._waiting += spans

    async def close(self) -> None:
        """Stop the periodic sending, and try once to send the waiting spans."""
        if self._task is not None:
            self._task.cancel()
        await self._flush()

    async def _send_on(self) -> None:
        while True:
            await asyncio.sleep(SEND_SECONDS)
            await self._flush()

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            why = await asyncio.to_thread(self._post, batch)
            if why:
                self.dropped += len(batch)
                if not self._away:
                    logger.warning("spans are dropped: %s: %s", self._url, why)
            elif self._away:
                logger.info("spans are sent again; %d were dropped", self.dropped)
            self._away = bool(why)
            if why:
                return

    def _post(self, batch: list[Span]) -> str:
        """Send a batch of spans; return the reason of a failure, "" on success."""
        scope = {"scope": self._scope, "spans": [span.to_json() for span in batch]}
        body = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        try:
            request = urllib.request.Request(self._url, msgspec.json.encode(body), self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                answer.read()
        except (OSError, ValueError) as error:
            return str(error)
        return ""
