"""The cost of sampling: tokens/s of concurrent requests, greedy and with other parameters.

    python -m bench.sampling_speed --model FOLDER --name llama-8b --out bench/results

Weights are random. A row's ratio is its throughput divided by that of greedy sampling.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, versions, write

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "frequency_penalty": {"temperature": 0.8, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
CONFIG: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 2048,
    "max_num_seqs": 256,
    "prefix_caching": False,
}
PROMPT, OUTPUT = 64, 128  # tokens
RUNS = 2  # the best run counts


def measure(model: str, together: list[int], fields: dict[str, Any]) -> dict[str, float]:
    """Measure each kind of sampling; return {"kind/number of requests": output tokens/s}."""
    from engine import LLM, SamplingParams

    rows = {}
    with LLM(model, **CONFIG, **fields) as llm:
        for count in together:
            prompts = [[5 + (i * 31 + j * 7) % 1000 for j in range(PROMPT)] for i in range(count)]
            for name, asked in KINDS.items():
                warm = SamplingParams(max_tokens=8, ignore_eos=True, **asked)
                params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **asked)
                llm.generate(prompts, warm, detokenize=False)
                best = 0.0
                for _ in range(RUNS):
                    began = time.perf_counter()
                    llm.generate(prompts, params, detokenize=False)
                    best = max(best, count * OUTPUT / (time.perf_counter() - began))
                rows[f"{name}/{count}"] = round(best, 1)
    return rows


def rows_of(name: str, found: dict[str, float]) -> list[Line]:
    rows = []
    for case, ours in found.items():
        greedy = found["greedy/" + case.partition("/")[2]]
        ratio = round(ours / greedy, 3)
        rows.append({"case": f"{name}/{case}", "ours": ours, "unit": "tok/s", "ratio": ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    fields = {"dtype": args.dtype}
    rows = rows_of(args.name, measure(args.model, args.requests, fields))
    for row in rows:
        print(f"{row['case']:<40} {row['ours']:>10} tok/s {row['ratio']:>7} of greedy")
    if args.out:
        config = {"ours": {**CONFIG, **fields, "versions": versions()}}
        write(args.out, f"sampling-speed-{args.name}", config, rows, rows)


if __name__ == "__main__":
    main()
