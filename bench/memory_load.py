"""A random load that needs more KV memory than the device has.

All requests must finish, by preemption, and the device must never run out of memory.

    python -m bench.memory_load --model FOLDER --seconds 600 --out bench/results

FOLDER needs only a config.json: weights are random. Lengths, sampling parameters, log-probabilities
and priorities are drawn; one request in twenty is aborted. The exit code is 1 if a step ran out of
memory, a request failed, nothing was preempted, or the device's memory grew after the first tenth.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.report.result_file import write
from bench.versus.engine import engine_fields
from engine.factory import build
from engine.library.llm import make_config
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore

# allowed growth in bytes: sampling graphs are captured on first use, and memory pools fragment
_GROWTH = 256 << 20


@dataclass
class Report:
    """The counts and memory figures of one load on an engine.

    seconds: duration.
    reserved_early, reserved: device bytes after a tenth of the time, and at the end.
    moments: the engine's state every ten seconds, if progress was printed.
    """

    seconds: float = 0.0
    ended: int = 0
    aborted: int = 0
    failed: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    most_running: int = 0
    reserved_early: int = 0
    reserved: int = 0
    moments: list[dict[str, int]] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        problems = []
        if self.out_of_memory:
            problems.append(f"{self.out_of_memory} steps found no memory")
        if self.failed:
            problems.append(f"{self.failed} requests failed")
        if not self.preemptions:
            problems.append("nothing was preempted: the load was too small to show anything")
        grown = self.reserved - self.reserved_early
        if grown > _GROWTH:
            problems.append(f"memory grew by {grown} bytes")
        return problems


def draw(rng: random.Random, number: int, longest: int, vocab: int) -> EngineRequest:
    """Return a random request of up to `longest` tokens; lengths are log-uniform."""

    def length(most: int) -> int:
        return max(1, int(most ** rng.random()))

    prompt = length(longest // 2)
    sampled = rng.random() < 0.5
    params = SamplingParams(
        temperature=0.9 if sampled else 0.0,
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 40]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        logprobs=rng.choice([None, None, None, 5]),
        prompt_logprobs=rng.choice([None, None, None, 0, 5]),
        max_tokens=rng.choice([longest // 2, length(longest // 2)]),
        ignore_eos=True,
    )
    ids = [rng.randrange(vocab) for _ in range(prompt)]
    return EngineRequest(number, ids, prompt, params, seed=number, priority=rng.choice([0, 0, 1]))


def load(core: EngineCore, limit: float, *, unit: str = "s", say: bool = False) -> Report:
    """Load the engine until the limit, then abort the remaining requests; return the counts.

    1.5 times as many requests are in the engine as can run.

    limit: the duration, in `unit`.
    unit: "s", or engine "steps", which do not depend on the machine's load.
    say: whether to print progress.
    """
    rng = random.Random(0)
    config, report = core.config, Report()
    wanted = config.max_num_seqs * 3 // 2
    vocab = min(config.vocab_size, 32_000)
    open_ids: set[int] = set()
    begin = reported = time.monotonic()
    number = 0
    now = 0.0
    while core.has_work() or now < limit:
        now = core.stats().step if unit == "steps" else time.monotonic() - begin
        while now < limit and len(open_ids) < wanted:
            core.add_request(draw(rng, number, config.max_model_len, vocab))
            open_ids.add(number)
            number += 1
        if open_ids and rng.random() < 0.05 * len(open_ids) / wanted:
            core.abort([rng.choice(sorted(open_ids))])
        if now >= limit:  # do not finish the remaining requests, which would take long
            core.abort(sorted(open_ids))
        for delta in core.step():
            report.output_tokens += len(delta.token_ids)
            if delta.finish:
                open_ids.discard(delta.id)
                report.ended += 1
                report.aborted += delta.finish == "abort"
                report.failed += delta.finish == "error"
        stats = core.stats()
        report.most_running = max(report.most_running, stats.running)
        if not report.reserved_early and now > limit / 10:
            report.reserved_early = _reserved()
        if say and time.monotonic() - reported > 10:
            reported = time.monotonic()
            moment = {unit: round(now), "running": stats.running, "waiting": stats.waiting,
                      "free_blocks": stats.free_blocks, "preemptions": stats.preemptions,
                      "reserved": _reserved()}  # fmt: skip
            report.moments.append(moment)
            print(json.dumps(moment), flush=True)
    core.check_integrity()
    stats = core.stats()
    assert stats.free_blocks == stats.total_blocks, "blocks are lost"
    report.seconds = round(time.monotonic() - begin, 1)
    report.preemptions, report.out_of_memory = stats.preemptions, stats.out_of_memory
    report.reserved = _reserved()
    return report


def _reserved() -> int:
    """Return the device bytes that torch has reserved; 1 without a CUDA device."""
    import torch

    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the result")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    values: dict[str, Any] = {"load_format": "dummy", "max_model_len": 8192, "max_num_seqs": 512}
    values |= engine_fields(args.set)
    core, ready = build(make_config(args.model, values))
    print(ready.memory_table, flush=True)
    report = load(core, args.seconds, say=True)
    row = asdict(report)
    moments = row.pop("moments")
    print(json.dumps(row))
    if args.out:
        config = {"ours": {**values, "memory": ready.memory_table.splitlines()}}
        write(args.out, f"memory-load-{args.name}", config, [{"case": args.name, **row}], moments)
    for fault in report.faults:
        print(f"wrong: {fault}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
