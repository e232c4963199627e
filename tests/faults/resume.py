"""Kills routers, HAProxy and Serve's actor that starts HAProxy in turn, while clients resume their
streams.

    python -m tests.faults.resume --minutes 10 --kills 20
    python -m tests.faults.resume --real      # the default model in float32, with seeds

Requests go through HAProxy as `manta serve` sets it up, to fake engines unless --real. Every answer
is compared with the answer before the kills: text, log-probabilities, finish reasons and usage of
all choices. Prints the figures as JSON; exit status 1 if a request failed or its answer differed,
or if no stream was cut.
"""

import argparse
import asyncio
import itertools
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from deployments.checkpoints.resolve import resolve_model
from deployments.openai_client import async_http_client
from loadtest.chaos.server_processes import ServerInstance, instance_at
from tests.deployments.on_ray.live import NAME, Live, live_server
from tests.deployments.on_ray.serve_cluster import tiny_model
from tests.faults.clients import Said

TARGETS = ("router", "haproxy", "manager")
MESSAGES = [{"role": "user", "content": "the answer"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}, "model": NAME}


def bodies(tokens: int) -> list[dict[str, Any]]:
    """Return request bodies of all kinds, with answers of `tokens` tokens."""
    common = {**USAGE, "max_tokens": tokens}
    chat = {**common, "messages": MESSAGES}
    return [
        {**chat, "temperature": 0},
        {**chat, "temperature": 1, "seed": 7, "n": 3},
        {**chat, "temperature": 1, "seed": 8, "logprobs": True, "top_logprobs": 2},
        {**chat, "temperature": 1, "seed": 9, "stop": ["zz", "qqq"]},
        {**common, "prompt": ["the answer", "a question"], "seed": 5, "n": 2},
    ]


@dataclass
class Run:
    """The counts of a run. cut: streams that broke and were resumed. gaps: longest pause of each
    stream, in seconds."""

    asked: int = 0
    cut: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        gaps = sorted(self.gaps) or [0.0]
        return {
            "requests": self.asked,
            "kills": dict(self.kills),
            "streams_cut": self.cut,
            "lost_or_different": len(self.wrong),
            "longest_pause_s": round(gaps[-1], 2),
            "pause_p50_s": round(gaps[len(gaps) // 2], 3),
            "first_wrong": self.wrong[:3],
        }


class Counting:
    """A wrapper of an httpx transport that counts requests which resume a stream."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.went_on = 0

    async def __aenter__(self) -> "Counting":
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.inner.__aexit__(*error)

    async def handle_async_request(self, request: Any) -> Any:
        response = await self.inner.handle_async_request(request)
        if response.status_code == 200 and "last-event-id" in request.headers:
            self.went_on += 1
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()


async def ask(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Said:
    """Send a streamed request, and return its answer in the form of tests/faults/clients.py."""
    said = Said()
    resource: Any = client.chat.completions if "messages" in body else client.completions
    last = 0.0
    try:
        async for chunk in await resource.create(**body):
            now = time.monotonic()
            if last and now - last > said.gap:
                said.gap, said.gap_end = now - last, now
            last = now
            said.take_event(chunk.model_dump())
    except (openai.OpenAIError, OSError, AssertionError) as error:
        said.error = f"{type(error).__name__}: {error}"
    except Exception as error:  # of the HTTP library, whichever it is
        said.error = f"{type(error).__name__}: {error}"
    return said


async def under_kills(
    url: str,
    instance: ServerInstance,
    *,
    targets: Sequence[str],
    seconds: float,
    tokens: int,
    at_once: int,
) -> Run:
    """Kill a process for each entry of `targets`, at intervals within `seconds`, while `at_once`
    clients send requests all the time."""
    run = Run()
    # The HTTP library of this version of the client: httpx or httpx2.
    library = openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
    counting = Counting(sys.modules[library].AsyncHTTPTransport())
    asked = bodies(tokens)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=20,
        http_client=async_http_client(transport=counting),
    ) as client:
        right = await asyncio.gather(*(ask(client, body) for body in asked))
        assert not any(answer.error for answer in right), right
        over = asyncio.Event()

        async def keep_asking(first: int) -> None:
            for number in itertools.count(first):
                if over.is_set():
                    return
                kind = number % len(asked)
                said = await ask(client, asked[kind])
                run.asked += 1
                run.gaps.append(said.gap)
                if said.outcome != right[kind].outcome:
                    run.wrong.append(f"{kind}: {said.error or said.outcome}"[:400])

        clients = [asyncio.create_task(keep_asking(number)) for number in range(at_once)]
        for target in targets:
            await asyncio.sleep(seconds / len(targets))
            for victim in instance.find(target)[: 1 if target == "router" else None]:
                run.kills[target] += victim.send(signal.SIGKILL)
        await asyncio.sleep(min(10.0, seconds / len(targets)))
        over.set()
        await asyncio.gather(*clients)
    run.cut = counting.went_on
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description="Streams that outlive routers and HAProxy.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--real", action="store_true", help="the default model in float32")
    options = parser.parse_args()
    engine: dict[str, Any] = {"max_num_seqs": 64}
    with tempfile.TemporaryDirectory() as folder:
        if options.real:
            model = Path(resolve_model("default"))
            engine |= {"dtype": "float32", "num_blocks": 2000}
        else:
            model = tiny_model(Path(folder) / "tiny", positions=8192)
        with live_server(model, fake=not options.real, engine=engine) as live:
            run = asyncio.run(_run(live, options))
    print(json.dumps(run.told(), indent=2))
    return 1 if run.wrong or not run.cut else 0


async def _run(live: Live, options: argparse.Namespace) -> Run:
    targets = list(itertools.islice(itertools.cycle(TARGETS), options.kills))
    return await under_kills(
        live.url,
        instance_at(live.url),
        targets=targets,
        seconds=options.minutes * 60,
        tokens=options.tokens,
        at_once=options.clients,
    )


if __name__ == "__main__":
    sys.exit(main())
