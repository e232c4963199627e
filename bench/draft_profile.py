r"""The profile of steps with drafts on a GPU: without drafts, with the drafter only, and verifying.

    python -m bench.draft_profile --model bench/models/qwen3-next-24 --name qwen3-next-24 \
        --set max_num_seqs=64 --out bench/results

FOLDER needs only a config.json: weights are random, and drafts are accepted by chance. The engine's
own loop runs three kinds of step, for each number of streams:

    plain    no drafts, and the drafter does not run
    reads    no drafts, but the drafter processes each token; the time beyond `plain` is that of the
             drafter
    drafts   each step verifies the previous step's drafts, and computes the next drafts; the time
             beyond `reads` is for the rows of drafts, for updating states by the accepted tokens,
             and for sampling

A kernel's time is its own duration, so sums may exceed a step if kernels overlap.
"""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.result_file import write
from bench.versus.engine import engine_fields
from engine.factory import build
from engine.library.llm import make_config
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.speculation.model_lengths import ModelLengths

CASES = ("plain", "reads", "drafts")
WARM, TIMED, PROFILED = 24, 96, 12  # steps
PROMPT = 128


class ForcedLengths(ModelLengths):
    """A controller of draft lengths that always or never drafts.

    case: one of CASES, which determines whether it drafts.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.case, self._longest = "plain", most

    def begin_step(self, entries: int) -> int:
        return self._longest if self.case == "drafts" and entries else 0

    def worth(self, records: Sequence[Any], lengths: Sequence[int]) -> list[int]:
        return [min(length, self._longest) for length in lengths]

    @property
    def dormant(self) -> bool:
        return self.case == "plain"


def start(core: EngineCore, streams: int) -> None:
    """Submit `streams` requests that are longer than the measurement."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2048)
    for number in range(streams):
        ids = [(number + 7 * at) % 32_000 for at in range(PROMPT)]
        core.add_request(EngineRequest(number, ids, PROMPT, params, seed=0))
    begun: set[int] = set()
    while len(begun) < streams:
        begun |= {delta.id for delta in core.step() if delta.token_ids}


def run(core: EngineCore, steps: int) -> tuple[float, float]:
    """Run `steps` steps of the loop; return the mean milliseconds and tokens of a step."""
    import torch

    torch.cuda.synchronize()
    began, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += sum(len(delta.token_ids) for delta in core.step())
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / steps, tokens / steps


def kernels_of(core: EngineCore) -> dict[str, tuple[float, float]]:
    """Return {kernel name: (microseconds, launches) per step}."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(core, PROFILED)
    seconds, launches = Counter[str](), Counter[str]()
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            seconds[event.name] += event.time_range.end - event.time_range.start
            launches[event.name] += 1
    return {name: (us / PROFILED, launches[name] / PROFILED) for name, us in seconds.most_common()}


def report(
    core: EngineCore, lengths: ForcedLengths, streams: int, top: int
) -> list[dict[str, Any]]:
    """Measure CASES with `streams` requests, print the added time per case, and return the rows.

    top: the number of kernels to print, ordered by added time.
    """
    start(core, streams)
    rows, before = [], dict[str, tuple[float, float]]()
    for case in CASES:
        lengths.case = case
        run(core, WARM)
        step_ms, tokens = run(core, TIMED)
        kernels = kernels_of(core)
        busy, count = (sum(part) for part in zip(*kernels.values(), strict=True))
        print(
            f"\n{streams} streams, {case}: {step_ms:.3f} ms a step, {tokens / streams:.2f} tokens "
            f"a request; kernels {busy / 1e3:.3f} ms, {count:.0f} launches",
            flush=True,
        )
        names = {*kernels, *before}
        added = {
            name: tuple(
                new - old
                for new, old in zip(
                    kernels.get(name, (0, 0)), before.get(name, (0, 0)), strict=True
                )
            )
            for name in names
        }
        for name, (us, launches) in sorted(added.items(), key=lambda item: -item[1][0])[:top]:
            print(f"    {us:+9.1f} us {launches:+7.1f} x  {name[:100]}")
        rows.append(
            {
                "case": f"{streams}/{case}",
                "ms": round(step_ms, 4),
                "tokens": round(tokens / streams, 3),
                "kernel_ms": round(busy / 1e3, 4),
                "launches": round(count, 1),
                "kernels": {
                    name[:120]: [round(us, 2), round(number, 2)]
                    for name, (us, number) in kernels.items()
                },
            }
        )
        before = kernels
    core.abort(list(core.scheduler.requests))
    while core.has_work():
        core.step()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the result")
    parser.add_argument("--method", default="mtp")
    parser.add_argument("--rates", default="0.85", help="acceptance of each draft")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--top", type=int, default=24, help="kernels to print")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    values = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "memory_fraction": 0.85,
        "prefix_caching": False,
        "speculation": {"method": args.method, "rates": args.rates},
        **engine_fields(args.set),
    }
    began = time.perf_counter()
    core, _ready = build(make_config(args.model, values))
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
    lengths = ForcedLengths(len(args.rates.split()))
    drafts = core.scheduler.drafts
    assert drafts is not None
    drafts.speculation._lengths = lengths
    rows = [row for count in args.streams for row in report(core, lengths, count, args.top)]
    if args.out:
        lines = [{"case": row["case"], "us_and_launches": row.pop("kernels")} for row in rows]
        write(args.out, f"draft-profile-{args.name}", {"ours": values}, rows, lines)


if __name__ == "__main__":
    main()
