"""The cost of loading adapters for other requests.

Measured are the inter-token times of one of many streams while adapters are added, read, copied to
the device and used once. The baseline has as many requests, equally spaced, that use a loaded
adapter. `bench.versus.lora` runs this in a separate process.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

SLOTS = 8
TURNS = 2
WARM_TOKENS = 16  # tokens of each stream to wait for, so that all prompts are computed


def measure(
    model: str,
    config: dict[str, Any],
    prompts: list[list[int]],
    tokens: int,
    adapters: Path,
    count: int,
    interval: float,
) -> dict[str, Any]:
    """Return percentiles of inter-token times in milliseconds, with loading and without.

    tokens: output tokens of each stream. adapters: a folder with adapters a0 .. a<count - 1>.
    interval: minimum seconds between two loads.
    """
    from engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    warm = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64)
    single = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    with LLM(model, **config) as llm:
        llm.add_adapter("there", adapters / "a0")
        llm.generate(prompts, warm, detokenize=False)
        slowest = took = rested = 0.0

        def use(name: str) -> None:
            (output,) = llm.generate([prompts[0][:8]], single, adapter=name, detokenize=False)
            (choice,) = output.outputs
            if len(choice.token_ids) != 1:
                raise RuntimeError(f"{name} was not used: {choice.finish_reason} {choice.error}")

        def load() -> None:
            """Use each adapter once, so that it is loaded to the device and evicts others."""
            nonlocal slowest, took
            start = time.perf_counter()
            for number in range(count):
                began = time.perf_counter()
                llm.add_adapter(f"a{number}", adapters / f"a{number}")
                use(f"a{number}")
                slowest = max(slowest, time.perf_counter() - began)
                _sleep_until(start + (number + 1) * interval)
            took = time.perf_counter() - start

        def disturb() -> None:
            # Run the baseline as long as the loads, because steps become longer with the streams.
            nonlocal rested
            start = time.perf_counter()
            for number in range(count):
                use("there")
                _sleep_until(start + (number + 1) * took / count)
            rested = time.perf_counter() - start

        def start_streams() -> list[Any]:
            return [llm.start_request(ids, params, detokenize=False) for ids in prompts]

        loading: list[float] = []
        quiet: list[float] = []
        for _ in range(TURNS):
            loading += gaps_beside(start_streams, load)
            for number in range(count):
                llm.remove_adapter(f"a{number}")
            use("there")  # load it again, as the loads may have evicted it
            quiet += gaps_beside(start_streams, disturb)
        figures = {
            f"{label}_{name}_ms": round(sorted(times)[int(len(times) * share)] * 1e3, 3)
            for label, times in (("quiet", quiet), ("loading", loading))
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        return {
            "loads": llm.stats().adapter_loads,
            "gaps": {"quiet": len(quiet), "loading": len(loading)},
            "seconds": {"quiet": round(rested, 3), "loading": round(took, 3)},
            "slowest_load_ms": round(slowest * 1e3, 3),
            **figures,
        }


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def gaps_beside(start_streams: Callable[[], list[Any]], disturb: Callable[[], None]) -> list[float]:
    """Return inter-token times of the first stream while `disturb` runs in another thread.

    Streams that end earlier are restarted. An exception of `disturb` is raised, since incomplete
    loads would look fast.
    """
    times: list[float] = []
    other: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        while other is None or not other.done():
            handles = start_streams()
            last = 0.0
            for number, output in enumerate(handles[0]):
                now = time.perf_counter()
                if output.outputs[0].error:
                    raise RuntimeError(f"a stream failed: {output.outputs[0].error}")
                if number >= WARM_TOKENS and other is None:
                    other = pool.submit(disturb)
                elif number > WARM_TOKENS and other is not None:
                    if other.done():
                        break
                    times.append(now - last)
                last = now
            for handle in handles:
                handle.release()
        other.result()
    return times
