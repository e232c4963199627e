"""`wake/NAME`: the time to first token of an engine that sleeps with its weights in host memory.

It runs on a GPU without Ray, routers and HTTP; weights are random. Each round puts the engine to
sleep and sends a request. `ours` is the median of the seconds to the first token, `peer` is the
target. The line also has: the time to fall asleep (only the first sleep copies weights to host
memory), the time to first token of the engine when awake, the time of a start, and the device
memory used while asleep.
"""

import statistics
import time
from collections.abc import Iterator

from bench.report.result_file import Line, ask_device
from engine import LLM, SamplingParams

PROMISE_S = 2.0
PROMPT, ANSWER = 128, 32  # tokens
AWAKE = 5  # measurements of the time to first token before the first sleep


def _ask(llm: LLM) -> tuple[float, list[int]]:
    """Send a request; return the seconds to the first token, and all tokens."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ANSWER)
    began, first, ids = time.perf_counter(), 0.0, []
    with llm.start_request(list(range(10, 10 + PROMPT)), params, detokenize=False) as handle:
        for output in handle:
            first = first or time.perf_counter() - began
            ids += output.outputs[0].token_ids
    return first, ids


def lines(rounds: int, model: str, name: str) -> Iterator[Line]:
    """Yield a line per round."""
    began = time.perf_counter()
    fields = {"load_format": "dummy", "sleep_in_host_memory": True, "prefix_caching": False}
    with LLM(model, **fields) as llm:
        ready = time.perf_counter() - began
        _ask(llm)
        awake = [_ask(llm) for _ in range(AWAKE)]
        text = awake[-1][1]
        for number in range(rounds):
            used = ask_device("memory.used")
            began = time.perf_counter()
            llm.sleep()
            asleep = time.perf_counter() - began
            used_mib = ask_device("memory.used")
            first, ids = _ask(llm)
            stats = llm.stats()
            yield {
                "case": f"wake/{name}",
                "round": number,
                "first_token_s": round(first, 3),
                "engine_s": round(stats.wake_seconds, 3),
                "asleep_s": round(asleep, 3),
                "awake_first_token_s": round(statistics.median(seconds for seconds, _ in awake), 4),
                "start_s": round(ready, 1),
                "awake_mib": int(used or 0),
                "asleep_mib": int(used_mib or 0),
                "same_tokens": ids == text,
            }


def rows(lines: list[Line]) -> list[Line]:
    case = lines[0]["case"]
    first, later = lines[0], lines[1:] or lines

    def row(name: str, ours: float, peer: float, unit: str) -> Line:
        ratio = round(ours / peer, 3) if peer else ""
        return {"case": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}

    wake = round(statistics.median(line["first_token_s"] for line in lines), 3)
    asleep = round(statistics.median(line["asleep_s"] for line in later), 3)
    return [
        row(case, wake, PROMISE_S, "s"),
        row(f"{case}, against a start", wake, first["start_s"], "s"),
        row(f"{case}, falling asleep again", asleep, first["asleep_s"], "s"),
        row(f"{case}, device memory asleep", later[-1]["asleep_mib"], first["awake_mib"], "MiB"),
        row(f"{case}, other tokens", sum(not line["same_tokens"] for line in lines), 0, "rounds"),
    ]
