"""Measures how the most expensive requests that are accepted delay other streams.

    python -m tests.faults.neighbours --out bench/results

The default model is served over HTTP by two replicas with a core each. Eight clients stream all the
time. Meanwhile expensive requests are sent, one after the other: a prompt that fills the context,
log-probabilities of as many prompt tokens as are allowed, four megabytes of digits, and messages of
many parts. The figure is the longest pause between two events of any of the eight streams. Exit
status 1: a pause exceeds its bound. Figures are invalid if the machine runs other work.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from deployments.checkpoints.resolve import resolve_model
from tests.deployments.on_ray.live import NAME, Live, live_server
from tests.faults.abuse.report import Report
from tests.faults.clients import Said, ask, post

STREAMS = 8
CALM = 5.0  # seconds without an expensive request, for comparison
SECONDS = 180.0  # time limit of an expensive request
PAUSE = 1.0  # bound on the seconds between two events of a stream

STEADY = {
    "model": NAME,
    "prompt": "The sea is wide and cold",
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 0,
}
LONG = {"model": NAME, "prompt": " sea" * 7000, "max_tokens": 1}
DEAR: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt of 7,000 tokens": ("/v1/completions", LONG),
    "log-probabilities of 7,000 prompt tokens": (
        "/v1/completions",
        LONG | {"prompt_logprobs": 0},
    ),
    "log-probabilities with 15 others": ("/v1/completions", LONG | {"prompt_logprobs": 15}),
    "4 MB of digits": (
        "/v1/completions",
        {"model": NAME, "prompt": "1234567890" * 400_000, "max_tokens": 1},
    ),
    "256 messages of 256 parts": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}] * 256}
                for _ in range(256)
            ],
            "max_tokens": 1,
        },
    ),
}


async def whole(port: int, path: str, body: dict[str, Any]) -> tuple[int, float]:
    """Send a request without streaming; return the answer's status, and the seconds it took."""
    began = time.monotonic()
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
        try:
            writer.write(post(path, body))
            answer = await reader.read()
        finally:
            writer.close()
    return int(answer.split(None, 2)[1]), time.monotonic() - began


async def beside(live: Live, dear: tuple[str, dict[str, Any]] | None) -> tuple[list[Said], Any]:
    """Return all streams that ran beside an expensive request, and its status and seconds."""
    stop, said = asyncio.Event(), list[Said]()

    async def stream() -> None:
        while not stop.is_set():
            said.append(await ask(live.port, STEADY))

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(stream())
        await asyncio.sleep(2.0)
        if dear is None:
            await asyncio.sleep(CALM)
            answer = (200, CALM)
        else:
            answer = await whole(live.port, *dear)
        stop.set()
    return said, answer


async def run(live: Live, report: Report) -> None:
    for name, dear in {"nothing": None, **DEAR}.items():
        said, (status, seconds) = await beside(live, dear)
        gap = max(answer.gap for answer in said)
        errors = [answer.error for answer in said if answer.error]
        line = {"beside": name, "status": status, "s": round(seconds, 2), "pause_s": round(gap, 3)}
        report.lines.append(line | {"streams": len(said), "errors": errors})
        print(json.dumps(report.lines[-1]), flush=True)
        report.add_row(f"neighbours/pause beside {name}", gap, "s", most=PAUSE)
        report.add_row(f"neighbours/streams that failed beside {name}", len(errors), "", most=0)
        report.add_row(f"neighbours/status of {name}", status, "", most=499)


def main() -> int:
    parser = argparse.ArgumentParser("tests.faults.neighbours", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the result files")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    model = resolve_model("default", progress=lambda what, done, total: None)
    report = Report()
    engine = {"dtype": "bfloat16", "num_threads": 1}
    with live_server(Path(model), engine=engine) as live:
        asyncio.run(run(live, report))
    return report.finish(
        options.out, "faults-neighbours", replicas=2, streams=STREAMS, engine=engine
    )


if __name__ == "__main__":
    sys.exit(main())
