"""A run of Manta's engine on the CPU with a workload of token ids; prints `RESULT {json}`.

It is our side's round in `bench.versus.cpu.formats`.

    python -m bench.versus.cpu.side MODEL --workload FILE --quantization gguf

The workload has a JSON object per line: kind (single, prefill or batch), prompt_ids, max_tokens.
Sampling is greedy, end tokens are ignored, and there is no prefix cache. Each kind runs once to
warm up; then the best of --repeat runs counts.
    prefill  tokens of the first such prompt / seconds to its first token
    single   (tokens - 1) / (seconds of all - seconds to the first)
    batch    new tokens of all such requests, submitted at once / seconds to the last
peak_rss_mb: sum of the peak memory of this process and of the engine's.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = ("prefill", "single", "batch")
KEYS = {"prefill": "prefill_tok_s", "single": "single_decode_tok_s", "batch": "batch_tok_s"}

Generate = Callable[[list[list[int]], list[int]], None]
"""f(prompts, output tokens of each): generates all outputs and returns then."""


def measure(
    generate: Generate, requests: list[dict[str, Any]], columns: list[str], repeat: int
) -> dict[str, float]:
    """Measure each column; return {value of KEYS: tokens per second}."""

    def best(rows: list[dict[str, Any]], counts: list[int]) -> float:
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            generate([row["prompt_ids"] for row in rows], counts)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    figures = {}
    for column in columns:
        rows = [row for row in requests if row["kind"] == column]
        rows = rows if column == "batch" else rows[:1]
        counts = [row["max_tokens"] for row in rows]
        generate([row["prompt_ids"] for row in rows], [min(4, count) for count in counts])
        if column == "prefill":
            rate = len(rows[0]["prompt_ids"]) / best(rows, [1])
        elif column == "single":
            first = best(rows, [1])
            seconds = best(rows, counts) - first
            if seconds <= 0:
                raise SystemExit(
                    f"single: {counts[0]} tokens took no longer than one; raise max_tokens of the "
                    "first such request, or --repeat"
                )
            rate = (counts[0] - 1) / seconds
        else:
            rate = sum(counts) / best(rows, counts)
        figures[KEYS[column]] = round(rate, 1)
    return figures


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="as `manta serve` takes it")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--columns", nargs="*", default=COLUMNS, choices=COLUMNS)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    from deployments.checkpoints.resolve import resolve_model
    from engine import LLM, SamplingParams

    folder = resolve_model(args.model, blocks=args.quantization == "gguf")
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": args.quantization}
    with LLM(folder, device="cpu", prefix_caching=False, max_num_seqs=32, **options) as llm:
        ready = time.perf_counter() - started

        def generate(prompts: list[list[int]], counts: list[int]) -> None:
            params = [
                SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
                for count in counts
            ]
            outputs = llm.generate(prompts, params, detokenize=False, progress=False)
            assert [len(out.outputs[0].token_ids) for out in outputs] == counts

        requests = [json.loads(line) for line in args.workload.read_text().splitlines()]
        result: dict[str, Any] = measure(generate, requests, args.columns, args.repeat)
    peaks = [resource.getrusage(who).ru_maxrss for who in _WHO]
    result |= {"ready_s": round(ready, 2), "peak_rss_mb": sum(peaks) // 1024}
    print("RESULT " + json.dumps(result), flush=True)


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)

if __name__ == "__main__":
    main()
