"""Collector: an HTTP server that records spans as an OpenTelemetry collector receives them."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """A fake OpenTelemetry collector, which records requests.

    posts: bodies of all requests. headers: headers of the last request. status: HTTP status of its
        answers.
    """

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.status = 200
        self.url = ""

    def spans(self, trace: str = "") -> list[dict[str, Any]]:
        return [
            span
            for post in self.posts
            for resource in post["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
            if trace in ("", span["traceId"])
        ]


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    spans = Collector()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Log nothing."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces" and spans.status == 200:
                spans.headers = {name.lower(): value for name, value in self.headers.items()}
                spans.posts.append(json.loads(body))
            self.send_response(spans.status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    spans.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield spans
    finally:
        server.shutdown()
        server.server_close()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    """Return name -> value of the attributes of a span in OTLP's JSON."""
    return {
        attribute["key"]: next(iter(attribute["value"].values()))
        for attribute in span["attributes"]
    }
