r"""The pause of streams while an engine's KV memory grows and shrinks (`kv_memory: growing`).

    python -m bench.kv.growth --out bench/results

It needs about two minutes, and a CUDA device with memory for random weights (16 GB for llama-8b)
and for `--gib`. --device cpu is for testing the bench. Streams decode during all phases:

 quiet    nothing changes
 grow     `--gib` GiB are mapped, as if requests needed them
 shrink   another engine asks for as much

For each phase the time between two steps is reported: the median, the maximum, and the maximum
minus the median of `quiet`, which is the pause. `publish_ms` is the time that the step loop itself
took for the change. Texts are compared with those of a run without changes, and the cache's address
must stay the same.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, ratio_row, write
from engine import factory
from engine.config.engine_config import EngineConfig
from engine.factory import runner as factory_runner
from engine.messages import EngineRequest
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.scheduling.memory.kv_growth import KVGrowth
from engine.scheduling.memory.kv_shares import KVShare

GIB = 1 << 30
PROMPT = 200  # tokens of each stream's prompt
QUIET = 200  # steps of the phase `quiet`


class Streams:
    """Streams that one engine decodes, with the time of each step."""

    def __init__(self, core: EngineCore, growth: KVGrowth, count: int, tokens: int) -> None:
        self.core = core
        self.growth = growth
        self.texts: dict[int, list[int]] = {id: [] for id in range(1, count + 1)}
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for id in self.texts:
            prompt = [(id * 7 + at) % 1000 for at in range(PROMPT)]
            core.add_request(EngineRequest(id, prompt, PROMPT, params, seed=id))
        while not all(self.texts.values()):
            self._step()

    def _step(self) -> None:
        for delta in self.core.step():
            assert not delta.error, delta.error
            self.texts[delta.id] += delta.token_ids

    def run(self, over: Callable[[int], bool]) -> list[float]:
        """Step until over(number of steps) or all streams have ended.

        Returns the milliseconds of each step.
        """
        times: list[float] = []
        last = time.perf_counter()
        while self.core.has_work() and not over(len(times)):
            self._step()
            now = time.perf_counter()
            times.append(1e3 * (now - last))
            last = now
        return times


def summary(phases: dict[str, list[float]]) -> dict[str, Any]:
    """Return the reported times of each phase.

    phases: name -> milliseconds of each step. One phase is `quiet`.
    """
    middle = statistics.median(phases["quiet"])
    return {
        name: {
            "steps": len(times),
            "middle_ms": round(statistics.median(times), 3),
            "longest_ms": round(max(times), 3),
            "pause_ms": round(max(times) - middle, 3),
        }
        for name, times in phases.items()
    }


def build(args: argparse.Namespace, folder: Path) -> EngineCore:
    """Build the engine; the folder has the file by which engines share the device's memory."""
    config = EngineConfig(
        model=args.model,
        device=args.device,
        load_format="dummy",
        kv_memory="growing",
        kv_cache_bytes=int(args.begin * GIB),
        kv_shared_bytes=int((args.begin + 2 * args.gib) * GIB),
        max_model_len=args.tokens + PROMPT + 8,
        max_num_seqs=args.streams,
        prefix_caching=False,
    )
    vars(factory_runner)["shares_folder"] = lambda device: folder
    return factory.build(config)[0]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one engine (see `build`) in all phases, and return its result line."""
    core = build(args, folder)
    growth, (pool,) = core._growth, core.scheduler.memory.pools
    assert growth is not None and isinstance(core._runner, ModelRunner)
    address = core._runner.kv.storage.data_ptr()

    streams = Streams(core, growth, args.streams, args.tokens)
    streams.run(lambda count: False)
    expected = streams.texts

    streams = Streams(core, growth, args.streams, args.tokens)
    quiet = streams.run(lambda count: count >= QUIET)
    before, growths, pages = pool.num_blocks, growth.growths, growth.pages.mapped_bytes
    growth.longest_pause = 0.0
    began = time.perf_counter()
    growth.add(pool, int(args.gib * GIB))
    grow = streams.run(lambda count: pool.num_blocks > before)
    seconds = time.perf_counter() - began
    grow += streams.run(lambda count: count >= 20)
    grown = growth.pages.mapped_bytes - pages
    published = growth.longest_pause

    other = KVShare(folder, 1 << 60, lambda: 0)
    shrinks, before = growth.shrinks, growth.pages.mapped_bytes
    growth.longest_pause = 0.0
    other.report(used=0, short=int(3 * args.gib * GIB))
    shrink = streams.run(lambda count: growth.pages.mapped_bytes < before)
    shrink += streams.run(lambda count: count >= 20)
    other.close()
    freed = before - growth.pages.mapped_bytes
    streams.run(lambda count: False)
    core.check_integrity()

    line = summary({"quiet": quiet, "grow": grow, "shrink": shrink})
    line["grow"] |= {
        "gib": round(grown / GIB, 2),
        "seconds": round(seconds, 3),
        "publish_ms": round(1e3 * published, 3),
        "growths": growth.growths - growths,
    }
    line["shrink"] |= {
        "gib": round(freed / GIB, 2),
        "publish_ms": round(1e3 * growth.longest_pause, 3),
        "shrinks": growth.shrinks - shrinks,
    }
    line["equal_texts"] = streams.texts == expected
    line["same_address"] = core._runner.kv.storage.data_ptr() == address
    core.close()
    return line


def rows_of(name: str, line: Line) -> list[Line]:
    """Compute rows <name>/<case>: the longest time between two steps, relative to `quiet`."""
    quiet = line["quiet"]["longest_ms"]
    return [
        {**ratio_row(f"{name}/{case}", line[case]["longest_ms"], quiet, "ms"), **line[case]}
        for case in ("grow", "shrink")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bench/models/llama-8b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gib", type=float, default=10.0)
    parser.add_argument("--begin", type=float, default=6.0, help="GiB of KV at the start")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1200, help="of each stream")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {"model": args.model, "streams": args.streams, "tokens": args.tokens}
    with tempfile.TemporaryDirectory() as folder:
        line = settings | measure(args, Path(folder))
    print(json.dumps(line, indent=1), flush=True)
    if args.out is not None:
        rows = rows_of(Path(args.model).name, line)
        write(args.out, "kv-growth", {"ours": settings}, rows, [line])


if __name__ == "__main__":
    main()
