"""The client against a server whose delays, losses and lies are known: every measure is right and
every fault told. The machine may be slow: times have a lower bound and a generous upper one."""

import asyncio
import itertools
import time
from collections import Counter

import pytest

from loadtest.client.load import LoadClient
from loadtest.http import clock
from loadtest.measure.figures import service_gaps, summarise
from loadtest.measure.records import RequestRecord, RunInfo
from loadtest.measure.verify import reference_of
from loadtest.scenario.parse import parse
from loadtest.scenario.schedule import lay_out
from tests.loadtest.fake_server import FakeServer

SLACK = 1.0  # seconds that a busy machine may add
RUN = RunInfo(name="", scenario="", seed=0, url="", model="", client_host="", started_at="")


def load(server: FakeServer, text: str, **more) -> list[RequestRecord]:
    """Run a scenario in this process. text: phases and the rest but target."""
    target = more.pop("target", "")
    return asyncio.run(_load(f"target: {{url: '{server.url}'{target}}}\n{text}", **more))


async def _load(text: str, stop_after: float | None = None, **more) -> list[RequestRecord]:
    scenario = parse(text)
    records: list[RequestRecord] = []
    client = LoadClient(scenario.target, records.append, **more)
    if stop_after is not None:
        asyncio.get_running_loop().call_later(stop_after, client.stop)
    await client.run(lay_out(scenario, "fake"), clock() + 0.05)
    assert not client._open and not client._connecting
    return sorted(records, key=lambda r: r.index)


def tokens(
    arrivals: str, *, count: int | None = 20, output: int = 8, work: str = "", more: str = ""
):
    requests = f"requests: {count}" if count else ""
    return (
        f"work: {{name: tokens, input: [3, 9], output: {output}, {work}}}\n"
        f"phases: [{{name: load, arrivals: {{{arrivals}}}, {requests}}}]\n{more}"
    )


FAST = "kind: constant, rate: 200"


def test_times_are_right() -> None:
    """TTFT, gaps and totals of a server with a known first token (80 ms) and gap (20 ms)."""
    with FakeServer(first=0.08, gap=0.02, per_chunk=2, headers={"x-queue-time": "12"}) as server:
        records = load(
            server, tokens("kind: constant, rate: 20", output=8), target=", token_ids: true"
        )
    assert len(records) == 20 and all(r.ok for r in records)
    for record in records:
        assert record.ttft_s >= 0.079 and record.e2e_s >= 0.139
        assert record.queue_s == 0.012 and record.request_id == "r1"
        assert record.first_byte_s is not None and record.sent_s is not None
        assert record.intended_s <= record.sent_s <= record.first_byte_s <= record.chunks[0][0]
        assert record.chunks_exact and [n for _, n in record.chunks] == [2, 2, 2, 2]
        assert record.output_tokens == record.output_tokens_expected == 8
        assert record.prompt_tokens is not None and 3 <= record.prompt_tokens <= 9
        assert record.finish_reason == "length" and record.cached_tokens == 1
        assert (record.missing_tokens, record.doubled_tokens) == (0, 0)
    s = summarise(records, RUN)
    assert 0.079 <= s.ttft.p50 <= 0.08 + SLACK
    spans = [r.chunks[-1][0] - r.chunks[0][0] for r in records]  # of six tokens each
    assert s.itl.mean == pytest.approx(sum(spans) / 120, abs=2e-6)
    assert s.itl.mean <= 0.01 + SLACK / 4
    assert s.tokens_per_chunk == 2
    intended = [r.intended_s for r in records]
    assert intended == [pytest.approx(i / 20, abs=1e-5) for i in range(20)]


def test_tokens_of_chunks() -> None:
    """Chunks of four tokens counted as one each: TPOT four times too long, tokens missing."""
    with FakeServer(per_chunk=4, gap=0.01) as server:
        run_of = load(server, tokens(FAST), target=", chunk_usage: true")
        blind = load(server, tokens(FAST))
    assert all(r.chunks_exact and [n for _, n in r.chunks] == [4, 4] for r in run_of)
    assert all(not r.chunks_exact and r.output_tokens == 8 and len(r.chunks) == 2 for r in blind)
    assert not any(r.missing_tokens or r.doubled_tokens for r in run_of + blind)


FAULTS = {
    "refuse_400": ("http_4xx", "code_400"),
    "refuse_429": ("http_429", "code_429"),
    "refuse_500": ("http_5xx", "code_500"),
    "refuse_503": ("http_503", "code_503"),
    "disconnect": ("disconnect", None),
    "reset": ("disconnect", None),
    "bad_http": ("bad_answer", None),
    "cut": ("cut", None),
    "no_done": ("cut", None),
    "no_finish": ("cut", None),
    "error_event": ("stream_error", "replica_died"),
    "error_then_done": ("stream_error", "replica_died"),
    "garbage": ("bad_answer", None),
    "not_sse": ("bad_answer", None),
    "hang": ("timeout", None),
    "stall": ("timeout", None),
}


def test_every_fault_is_told() -> None:
    """A fault in the wrong class, or taken for a success: smg ends a dead stream with [DONE]."""
    names = [*FAULTS, None]
    with FakeServer(fault=lambda number, body: names[number % len(names)]) as server:
        records = load(
            server,
            tokens("kind: constant, rate: 100", count=2 * len(names)),
            target=", chunk_timeout: 700ms",
        )
        # Arrival order is not index order when two connections race; count classes instead.
        counter = Counter((r.error_class, r.error_code) for r in records)
    wanted = Counter({(None, None): 2})
    for expected in FAULTS.values():
        wanted[expected] += 2
    assert counter == wanted
    cut = [r for r in records if r.error_class in ("cut", "stream_error", "timeout") and r.chunks]
    s = summarise(records, RUN)
    assert s.failed == 2 * len(FAULTS) and s.succeeded == 2
    assert s.lost_tokens == sum(r.output_tokens for r in records if r.failed) > 0
    assert cut and all(r.status == 200 for r in cut)


def test_nobody_there() -> None:
    """A refused connection is a failure at its own time, not an exception."""
    with FakeServer() as server:
        url = server.url
    server_gone = FakeServer(port=int(url.rsplit(":", 1)[1]))
    records = load(server_gone, tokens("kind: constant, rate: 50", count=10))
    assert [r.error_class for r in records] == ["connect"] * 10
    assert all(r.status == 0 and not r.chunks for r in records)


def test_a_server_that_closes_after_each_answer() -> None:
    """Bug: llama.cpp's server ends connections after streams without a word in the head, and each
    second request of a closed loop counts as a failure."""
    with FakeServer(closes=True) as server:
        records = load(server, tokens("kind: closed, concurrency: 2", count=30))
    assert len(records) == 30 and not [r for r in records if not r.ok]


def test_unary() -> None:
    """A unary answer has no TTFT; its tokens are the usage's."""
    with FakeServer(first=0.05) as server:
        records = load(server, tokens(FAST, work="stream: 0"))
    assert all(r.ok and not r.stream and r.ttft_s is None for r in records)
    assert all(r.output_tokens == 8 and r.chunks[0][1] == 8 and r.e2e_s >= 0.049 for r in records)
    with FakeServer(fault=lambda n, b: "garbage") as server:
        records = load(server, tokens(FAST, count=3, work="stream: 0"))
    assert {r.error_class for r in records} == {"bad_answer"}


def test_chat() -> None:
    """The role's empty first chunk taken for the first token makes TTFT too good."""
    with FakeServer(gap=0.05) as server:
        text = tokens(FAST, count=5).replace("name: tokens, input: [3, 9]", "name: chat")
        records = load(server, text)
    assert all(r.ok and len(r.chunks) == 8 for r in records)
    assert all(r.output_tokens_expected is None for r in records)


def test_open_loop_does_not_wait() -> None:
    """A stalled server that slows the load down hides its own stall."""
    with FakeServer(until_seen=20) as server:
        records = load(server, tokens("kind: constant, rate: 40", count=20))
    last = records[-1].intended_s
    assert all(record.sent_s < min(other.end_s for other in records) for record in records)
    assert all(record.ttft_s > last - record.intended_s for record in records)


def test_closed_loop_keeps_its_number() -> None:
    """A closed loop that starts the next request before an answer has ended, or too few."""
    with FakeServer(first=0.03) as server:
        records = load(server, tokens("kind: closed, concurrency: 3", count=12))
    assert sorted(r.index for r in records) == list(range(12))
    events = sorted([(r.intended_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    depth = list(itertools.accumulate(step for _, step in events))
    assert max(depth) <= 4  # an end and the next start bear the same rounded time
    assert sum(1 for d in depth if d >= 3) >= 8


def test_closed_loop_over_a_time() -> None:
    """A closed loop that outlives its phase, or forgets the next one."""
    with FakeServer(first=0.02) as server:
        records = load(
            server,
            "work: {name: tokens, input: 3, output: 2}\n"
            "phases:\n- {name: a, arrivals: {kind: closed, concurrency: 2}, duration: 1200ms}\n"
            "- {name: b, arrivals: {kind: at_once}, requests: 4}\n",
        )
    a = [r for r in records if r.phase == "a"]
    b = [r for r in records if r.phase == "b"]
    assert 2 <= len(a) <= 120 and max(r.intended_s for r in a) < 1.2
    assert [r.intended_s for r in b] == [pytest.approx(1.2, abs=1e-3)] * 4


def test_sessions_wait_for_answers() -> None:
    """A conversation's next turn sent before the answer, or without the pause."""
    with FakeServer(first=0.05) as server:
        text = tokens("kind: sessions, rate: 50, turns: 3, think: 100ms", count=4)
        records = load(server, text)
    assert [r.index for r in records] == list(range(12))
    for session in (0, 3, 6, 9):
        turns = [r for r in records if r.session == session]
        assert len(turns) == 3
        assert all(b.intended_s > a.end_s for a, b in itertools.pairwise(turns))
    asked = [body["prompt"] for body in server.seen]
    assert any(long[: len(short)] == short for short in asked for long in asked if long != short)


def test_cancels_hang_up() -> None:
    """A cancelled request counted as a failure, or left open at the server."""
    with FakeServer(gap=0.05) as server:
        records = load(
            server, tokens(FAST, count=10, output=40, work="cancel: {share: 1, after_chunks: 3}")
        )
        time.sleep(0.3)
        assert server.broken_off == 10
    assert all(r.cancelled and not r.failed and not r.ok and len(r.chunks) >= 3 for r in records)
    with FakeServer(first=5) as server:
        records = load(
            server, tokens(FAST, count=3, work="stream: 0, cancel: {share: 1, after: 100ms}")
        )
    assert all(r.cancelled and r.e2e_s >= 0.09 for r in records)


def test_slow_readers() -> None:
    """A slow reader that reads at full speed tests nothing."""
    with FakeServer() as server:
        text = tokens("kind: constant, rate: 50", count=2, output=100)
        slow = load(server, text.replace("100, }", "100, slow: {share: 1, pause: 50ms}}"))
        fast = load(server, text)
    assert all(r.ok and r.slow_reader and r.output_tokens == 100 for r in slow)
    assert min(r.e2e_s for r in slow) > 0.4
    assert summarise(slow, RUN).e2e.count == 0 and summarise(fast, RUN).e2e.count == 2


def test_mixes_reach_the_server() -> None:
    """Tenants without their headers, adapters that are not the model, unary asked as a stream."""
    work = (
        "stream: 0.5, adapters: {names: [x, y], choice: round_robin}, "
        "tenants: [{name: a, headers: {x-tenant: a}, priority: 3}]"
    )
    timing = {"queue_ms": 7.5, "migrations": 2, "replicas": ["r0", "r1"]}
    with FakeServer(timing=timing) as server:
        records = load(server, tokens(FAST, count=20, work=work))
    assert Counter(body["model"] for body in server.seen) == {"x": 10, "y": 10}
    assert all(headers["x-tenant"] == "a" for headers in server.seen_headers)
    assert all(body["priority"] == 3 for body in server.seen)
    streams = sum(bool(body.get("stream")) for body in server.seen)
    assert 2 < streams < 18 and streams == sum(r.stream for r in records)
    assert {r.tenant for r in records} == {"a"} and {r.adapter for r in records} == {"x", "y"}
    summary = summarise(records, RUN)
    assert summary.migrations == 40 and {r.replica for r in records} == {"r1"}
    assert summary.queue.p50 == summary.queue.max == 0.0075
    with FakeServer(timing="another server's") as server:
        strange = load(server, tokens(FAST, count=2))
    assert all(r.ok and r.migrations is None and r.queue_s is None for r in strange)


def test_verification() -> None:
    """Right answers called wrong, wrong ones called right, lost and doubled tokens not told."""
    text = tokens(FAST, count=24, output=12)
    references = {}

    def keep(spec, record, answer):
        references[spec.key()] = reference_of(spec.key(), record, answer)

    with FakeServer() as server:
        load(server, text, keep=keep)
    assert len(references) == 24
    lies = [None, "wrong", "lose", "double", "cut", "refuse_500"]
    for tells_ids in (True, False):
        with FakeServer(
            fault=lambda number, body: lies[number % len(lies)], tells_ids=tells_ids
        ) as server:
            records = load(server, text, references=references)
        different = [r for r in records if r.verified == "different"]
        assert len(different) == 12 and all(r.ok for r in different)
        # A beginning is right so far; of a refused one there is nothing to be right or wrong.
        assert sum(r.verified == "ok" for r in records) == 4 + 4
        assert all(r.verified == "not checked" for r in records if r.status == 500)
        assert all(r.error_class for r in records if r.failed)
        slips = Counter((r.missing_tokens, r.doubled_tokens) for r in different)
        assert slips == {(2, 0): 4, (0, 2): 4, (0, 0): 4}, tells_ids
        s = summarise(records, RUN)
        assert (s.missing_tokens, s.doubled_tokens, s.verified_different) == (8, 8, 12)


def test_counted_losses_without_a_reference() -> None:
    """Usage says 8, ids of 6 or 10 came: told even if nobody knows the right text."""
    lies = ["lose", "double"]
    with FakeServer(fault=lambda number, body: lies[number % 2]) as server:
        records = load(server, tokens(FAST, count=10), target=", token_ids: true")
    assert Counter((r.missing_tokens, r.doubled_tokens) for r in records) == {(2, 0): 5, (0, 2): 5}


def test_outage_is_time_without_service() -> None:
    """A second of refusals hidden between two good moments."""
    began = time.monotonic()

    def out(number, body):
        return "refuse_503" if 0.6 < time.monotonic() - began < 1.8 else None

    with FakeServer(fault=out) as server:
        records = load(server, tokens("kind: constant, rate: 50", count=120, output=2))
    longest = max(end - start for start, end in service_gaps(records))
    assert 1.0 <= longest <= 1.2 + SLACK
    s = summarise(records, RUN)
    assert s.errors.keys() == {"http_503"} and s.no_service_s >= 1.0


def test_stop_hangs_up() -> None:
    """Ctrl-C that waits for a server which never answers."""
    with FakeServer(fault=lambda n, b: "hang") as server:
        began = time.monotonic()
        records = load(server, tokens("kind: constant, rate: 20", count=200), stop_after=0.5)
        assert time.monotonic() - began < 0.6 + 2 * SLACK
    assert 0 < len(records) < 60 and all(r.cancelled for r in records)


@pytest.mark.parametrize(
    ("retry_after", "fault", "most"),
    [("60", "refuse_503", 4), ("soon", "refuse_429", 4 * 6), ("", "refuse_500", 4 * 6)],
)
def test_refused_users_wait(retry_after: str, fault: str, most: int) -> None:
    """Sixteen users of a closed loop sent 700 requests a second to a server that refused them."""
    headers = {"retry-after": retry_after}
    with FakeServer(fault=lambda n, b: fault, headers=headers) as server:
        began = time.monotonic()
        text = "{name: load, arrivals: {kind: closed, concurrency: 4}, duration: 0.5, drain: true}"
        records = load(server, f"work: {{name: tokens, input: 3, output: 8}}\nphases: [{text}]\n")
        assert time.monotonic() - began < 0.5 + 2 * SLACK
    assert 4 <= len(records) <= most and all(r.failed for r in records)


def test_several_urls_take_turns() -> None:
    """All of the load on the first of two proxies."""
    with FakeServer() as fake_server, FakeServer() as two:
        text = f"target: {{url: ['{fake_server.url}', '{two.url}/v1']}}\n" + tokens(FAST, count=10)
        records = asyncio.run(_load(text))
    assert all(r.ok for r in records) and len(fake_server.seen) == len(two.seen) == 5


def test_connections_are_reused_and_idle_ones_dropped() -> None:
    """A new connection a request costs ports and time; a stale one costs a failure."""
    with FakeServer() as server:
        records = load(server, tokens("kind: closed, concurrency: 1", count=60))
    assert 1 <= sum(r.connect_s > 0 for r in records) < 30, "they rest for 10 ms at most"
