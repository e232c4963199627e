"""HTTP as it may come: in any pieces, with any framing."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtest.http import Address, ConnectionPool, HttpConnection

EVENTS = b'data: {"a": 1}\n\n' * 3 + b"data: [DONE]\n\n"


class Transport:
    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written = data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


class Taker:
    def __init__(self) -> None:
        self.status, self.body, self.ended, self.lost = 0, b"", 0, ""

    def on_head(self, status, headers, now):
        self.status = status

    def on_body(self, data, now):
        self.body += data

    def on_end(self, now):
        self.ended += 1

    def on_lost(self, error, now):
        self.lost = error


def feed(data: bytes, cuts: list[int], eof: bool = False) -> tuple[Taker, HttpConnection]:
    connection = HttpConnection(ConnectionPool(Address("h", 1, "", None, b"")))
    connection.transport = Transport()
    taker = Taker()
    connection.send(b"", taker)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        piece = data[start:end]
        connection.get_buffer(-1)[: len(piece)] = piece
        connection.buffer_updated(len(piece))
    if eof:
        connection.eof_received()
        connection.connection_lost(None)
    return taker, connection


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, at = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", 0
    for size in [*sizes, len(body)]:
        piece = body[at : at + size]
        if piece:
            out += b"%X;x=y\r\n%b\r\n" % (len(piece), piece)
        at += size
    return out + b"0\r\ntrailer: 1\r\n\r\n"


@given(st.lists(st.integers(1, 9), max_size=5), st.lists(st.integers(0, 300), max_size=12))
def test_chunks_in_any_pieces(sizes: list[int], cuts: list[int]) -> None:
    """A size line, a line break or an end that falls between two reads."""
    taker, connection = feed(chunked(EVENTS, sizes), cuts)
    assert (taker.status, taker.body, taker.ended, taker.lost) == (200, EVENTS, 1, "")
    assert connection.usable


@given(st.lists(st.integers(0, 300), max_size=8))
def test_lengths_and_ends(cuts: list[int]) -> None:
    """A body by length, by the connection's end, after an interim answer, of no length."""
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 No\r\ncontent-length: 5\r\n\r\n"
    taker, connection = feed(head + b"hello", cuts)
    assert (taker.status, taker.body, taker.ended) == (503, b"hello", 1) and connection.usable
    taker, connection = feed(b"HTTP/1.0 200 OK\r\n\r\nhello", cuts, eof=True)
    assert (taker.body, taker.ended, taker.lost) == (b"hello", 1, "")
    taker, _ = feed(b"HTTP/1.1 204 No\r\ncontent-length: 0\r\n\r\n", cuts)
    assert taker.ended == 1
    taker, connection = feed(
        b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 1\r\n\r\nx", cuts
    )
    assert taker.ended == 1 and not connection.usable


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4), st.booleans())
def test_garbage_ends_once(data: bytes, cuts: list[int], framed: bool) -> None:
    """An exception inside the event loop, or a request that never ends."""
    if framed:
        data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data
    taker, _ = feed(data, cuts, eof=True)
    assert taker.ended + bool(taker.lost) == 1


def test_too_short_is_lost() -> None:
    """A body that ends before its announced length taken for a whole one."""
    taker, _ = feed(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", [], eof=True)
    assert not taker.ended and "closed" in taker.lost
    taker, _ = feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", [], eof=True)
    assert not taker.ended and taker.lost
