"""`tpot-50ms/itl_p99` and `tpot-50ms/goodput`: whether `target_tpot_ms` is met, and its cost.

An engine with random weights, without Ray, routers and HTTP, gets 1,024 concurrent streams of the
workload `dialogue`, once with the target and once without. Measurement ends when the last request
has been submitted, so concurrency is constant. Inter-token times are between frames that leave the
engine's process. Goodput counts tokens that came within the target; its peer is the throughput of
the engine without a target.

Two more numbers show the causes of late tokens: the p99 by the engine's own clock, between the
results of two steps, and the number of late tokens while the streams started.
"""

import asyncio
import time
from collections.abc import Iterator

from bench.report.result_file import Line, ratio_row
from engine.config.engine_config import EngineConfig
from engine.messages import EngineRequest, StepFrame
from engine.process.client import EngineClient
from engine.sampling_params import SamplingParams
from loadtest.scenario import workloads

TARGET_MS = 50.0
STREAMS = 1024
BEGIN_SECONDS = 3.0
ROUNDS_OF_STREAMS = 2  # requests per stream; the bench does not wait for the last ones
MAX_MODEL_LEN = 4096


class Offered:
    """A source of requests that keeps STREAMS requests in an engine.

    gaps: seconds between a request's tokens. steps: these seconds by the engine's clock.
    begin: the number of gaps in the first BEGIN_SECONDS.
    """

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.steps: list[float] = []
        self.begin = 0
        self._began = self._busy = 0.0
        self.tokens = 0
        self.failed: list[str] = []
        self.rows: list[int] = []  # running requests, per frame
        self.over = asyncio.Event()  # set once every request was submitted
        self.client = EngineClient(self._take_frame, lambda error: self._died(str(error)))
        requests = workloads.build("dialogue") * ROUNDS_OF_STREAMS
        self._left = iter(enumerate(requests, 1))
        self._last: dict[int, float] = {}  # time of each request's last tokens

    def _died(self, why: str) -> None:
        self.failed.append(why)
        self.over.set()

    def offer(self) -> None:
        """Submit the next request."""
        prompt = next(self._left, None)
        if prompt is None:
            self.over.set()
            return
        number, (ids, count) = prompt
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
        self.client.submit(EngineRequest(number, ids, len(ids), params, seed=0))

    def _take_frame(self, frame: StepFrame) -> None:
        if self.over.is_set():
            return
        now = time.perf_counter()
        self._began = self._began or now
        step, self._busy = frame.stats.busy_seconds - self._busy, frame.stats.busy_seconds
        self.rows.append(frame.stats.running)
        for delta in frame.deltas:
            if delta.finish == "error":
                self.failed.append(delta.error)
            count = len(delta.token_ids)
            self.tokens += count
            last = self._last.get(delta.id)
            if last is not None and count:
                self.gaps += [now - last, *[0.0] * (count - 1)]
                self.steps.append(step)
            if count:
                self._last[delta.id] = now
            if delta.finish:
                self._last.pop(delta.id, None)
                self.offer()
        if now - self._began < BEGIN_SECONDS:
            self.begin = len(self.gaps)


async def _measure(model: str, target_ms: float) -> Line:
    offered = Offered()
    config = EngineConfig(
        model=model, load_format="dummy", prefix_caching=False, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=STREAMS, target_tpot_ms=target_ms,
    )  # fmt: skip
    await offered.client.start(config)
    try:
        began = time.perf_counter()
        for _ in range(STREAMS):
            offered.offer()
        await offered.over.wait()
        seconds = time.perf_counter() - began
    finally:
        await offered.client.close()
    if offered.failed:
        raise SystemExit(f"{len(offered.failed)} requests failed: {offered.failed[0]}")
    begin = sum(gap * 1e3 > TARGET_MS for gap in offered.gaps[: offered.begin])
    gaps, steps = sorted(offered.gaps), sorted(offered.steps)
    late = sum(gap * 1e3 > TARGET_MS for gap in gaps)
    return {
        "case": "tpot-50ms",
        "target_ms": target_ms,
        "itl_p99_ms": round(gaps[int(0.99 * len(gaps))] * 1e3, 2),
        "itl_p50_ms": round(gaps[len(gaps) // 2] * 1e3, 2),
        "step_p99_ms": round(steps[int(0.99 * len(steps))] * 1e3, 2),
        "late": late,
        "late_in_the_beginning": begin,
        "tok_s": round(offered.tokens / seconds, 1),
        "goodput_tok_s": round((offered.tokens - late) / seconds, 1),
        "rows": round(sum(offered.rows) / len(offered.rows), 1),
        "seconds": round(seconds, 1),
    }


def lines(rounds: int, model: str, name: str) -> Iterator[Line]:
    """Yield two lines per round: with the target, and without."""
    for _ in range(rounds):
        for target in (TARGET_MS, 0.0):
            yield {**asyncio.run(_measure(model, target)), "model": name}


def rows(lines: list[Line]) -> list[Line]:
    """Compute the rows: the worst round's p99, and the least goodput against the best peer's."""
    capped = [line for line in lines if line["target_ms"]]
    free = [line for line in lines if not line["target_ms"]]
    p99 = max(line["itl_p99_ms"] for line in capped)
    good = min(line["goodput_tok_s"] for line in capped)
    best = max(line["tok_s"] for line in free)
    return [
        ratio_row("tpot-50ms/itl_p99", p99, TARGET_MS, "ms"),
        ratio_row("tpot-50ms/goodput", good, best, "tok/s"),
    ]
