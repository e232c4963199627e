"""Spans of requests: whose trace, what times, and what becomes of them without a collector."""

import asyncio
import logging

import pytest

from deployments.api.app import build_asgi
from deployments.config.load import parse_config
from deployments.observe.otlp import (
    MAX_SPANS,
    SERVER,
    Span,
    SpanExporter,
    TraceContext,
    TracingSettings,
    read_context,
)
from deployments.router.request_trace import context_of, spans_of
from deployments.routing.decision import RoutingDecision
from engine.messages import Delta
from tests.deployments.api.asgi import COMPLETION, Client
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.replica.collector import attributes, collector
from tests.deployments.router.test_request_trace import trace

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"
SETTINGS = TracingSettings("http://127.0.0.1:1", sample=1.0)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        HEADER.upper(),
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{HEADER}-more",
    ],
)
def test_what_is_no_trace_context_begins_a_new_trace(header: str) -> None:
    """A trace whose ids a collector refuses, with all spans that came along."""
    assert read_context(header) is None
    context = context_of(header, "", SETTINGS)
    assert context is not None and len(context.trace) == 32 and not context.parent


def test_the_caller_decides_what_is_sampled() -> None:
    """Half of a trace; spans of a caller that wants none."""
    never = TracingSettings("http://127.0.0.1:1", sample=0.0)
    assert context_of(HEADER, "a=b", never) == TraceContext(TRACE, PARENT, True, "a=b")
    assert context_of(f"01-{TRACE}-{PARENT}-01-later", "", never) is not None
    assert context_of(f"00-{TRACE}-{PARENT}-00", "", SETTINGS) is None
    assert context_of("", "", never) is None


def test_a_moved_request_has_its_times_in_router_replicas_and_engine() -> None:
    """Times that overlap or have gaps; a span whose parent is not there."""
    request_trace = trace("asked", arrived=100.0)
    request_trace.received_at = 1000.0
    request_trace.sent(RoutingDecision("gpu/1", "prefix", 0.25, cached=4), 101.0, 0)
    request_trace.begun(Delta(1, [7], cached=4, queued_us=200_000, adapter_us=0), 101.5)
    request_trace.moves("gpu/1", "lost: gone", 102.0)
    request_trace.sent(RoutingDecision("cpu/2", "only", 1.0), 102.5, 5)
    request_trace.finish += ["stop", "length"]
    request_trace.ends(13, "", 104.0)
    root, *rest = spans_of(request_trace, TraceContext(TRACE, PARENT), "router-1")
    assert (root.start, root.end, root.kind) == (1000.0, 1004.0, SERVER)
    assert root.context.parent == PARENT and not root.error
    assert root.attributes["gen_ai.usage.output_tokens"] == 13
    assert root.attributes["gen_ai.usage.input_tokens"] == 12
    assert root.attributes["gen_ai.server.time_to_first_token"] == 1.5
    times = [(span.name, round(span.start - 1000, 3), round(span.end - 1000, 3)) for span in rest]
    assert times == [
        ("router.queue", 0.0, 1.0),
        ("replica", 1.0, 2.0),
        ("engine.queue", 1.0, 1.2),
        ("engine.prefill", 1.2, 1.5),
        ("engine.decode", 1.5, 2.0),
        ("replica", 2.5, 4.0),
    ]
    first, last = (span for span in rest if span.name == "replica")
    assert first.error == "lost: gone" and not last.error
    assert last.attributes["manta.emitted_tokens"] == 5
    parents = {span.context.parent for span in rest}
    assert parents == {root.id, first.id} and {span.context.trace for span in rest} == {TRACE}
    body = root.to_json()
    assert body["startTimeUnixNano"] == "1000000000000" and body["parentSpanId"] == PARENT
    assert attributes(body)["manta.router"] == "router-1" and "status" not in body


def test_a_request_that_never_ran() -> None:
    """An error without a span is the one that is looked for."""
    request_trace = trace()
    request_trace.ends(0, "no_replica", 130.0)
    root, queue = spans_of(request_trace, TraceContext(TRACE), "r")
    assert root.to_json()["status"] == {"code": 2, "message": "no_replica"}
    assert queue.end == root.end and "parentSpanId" not in root.to_json()


def test_headers_reach_the_backend() -> None:
    """A trace that ends at the door."""
    backend = FakeBackend()
    headers = [
        (b"content-type", b"application/json"),
        (b"traceparent", HEADER.encode()),
        (b"tracestate", b"a=b"),
    ]
    client = Client(build_asgi(backend))
    asyncio.run(client.post("/v1/completions", COMPLETION, headers=headers))
    asyncio.run(client.post("/v1/completions", COMPLETION))
    assert [request.trace for request in backend.requests] == [(HEADER, "a=b"), ("", "")]


def test_spans_arrive_and_a_collector_that_is_away_holds_nothing_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that grows while its collector is away, or fills its log."""
    monkeypatch.setattr("deployments.observe.otlp.SEND_SECONDS", 0.01)
    config = {"tracing": {"endpoint": "http://x:4318/", "headers": {"x-key": "1"}}}
    settings = parse_config(config, {}).tracing.settings()
    assert settings is not None and "x-key" not in repr(settings)
    assert parse_config({}, {}).tracing.settings() is None

    def spans(count: int) -> list[Span]:
        return [Span("a", TraceContext(TRACE), 1.0, 2.0) for _ in range(count)]

    async def case() -> None:
        with collector() as collected:
            tracing = TracingSettings(f"{collected.url}/", headers=settings.headers)
            exporter = SpanExporter(tracing, "router-1", "1.2")
            exporter.start()
            exporter.add_spans(spans(700))
            while len(collected.spans()) < 700:
                await asyncio.sleep(0.01)
            assert len(collected.posts) == 2 and collected.headers["x-key"] == "1"
            resource = collected.posts[0]["resourceSpans"][0]["resource"]
            assert attributes(resource)["service.instance.id"] == "router-1"
            collected.status = 503
            for _ in range(3):
                exporter.add_spans(spans(1))
                await asyncio.sleep(0.05)
            assert exporter.dropped == 3
            collected.status = 200
            exporter.add_spans(spans(1))
            await exporter.close()
            assert len(collected.spans()) == 701
            exporter.add_spans(spans(MAX_SPANS + 1))
            assert exporter.dropped == 3 + MAX_SPANS + 1

    with caplog.at_level(logging.INFO, "manta.router"):
        asyncio.run(case())
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "dropped" in said[0] and "sent again" in said[1]
