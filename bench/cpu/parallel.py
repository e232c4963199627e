"""Ranks on the CPU: a model split over ranks against one rank with as many cores.

Each rank of the split model has one core.

    python -m bench.cpu.parallel --out bench/results               # the default model, in 16 bits
    python -m bench.cpu.parallel --model ./folder --ranks 4 --dtype float32
    python -m bench.cpu.parallel --by pipeline_parallel            # in stages of layers

Cases: `single` is one stream, `batch` eight at once, `prompt` a long prompt and one token. Both
engines run in alternation; the other one sleeps meanwhile. `ratio` is the seconds of one rank
divided by those of several, the best rounds of each: at 1 they are equally fast. `same` is the
share of equal outputs, which is 1 in float32.
"""

import argparse
import json
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.report.result_file import print_ratios, write
from deployments.checkpoints.resolve import resolve_model
from engine import LLM, SamplingParams

# name: (requests, prompt tokens, output tokens)
CASES = {"single": (1, 32, 96), "batch": (8, 32, 64), "prompt": (1, 480, 1)}


def turn(llm: LLM, case: str, number: int) -> tuple[float, list[list[int]]]:
    """Run one round; return its seconds and outputs.

    Prompts differ in each round, so that none is in the prefix cache.
    """
    requests, prompt, output = CASES[case]
    draw = random.Random(f"{case} {number}")
    top = llm.ready.vocab_size - 1
    prompts = [[draw.randint(3, top) for _ in range(prompt)] for _ in range(requests)]
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, detokenize=False, progress=False)
    return time.perf_counter() - began, [
        request_output.outputs[0].token_ids for request_output in outputs
    ]


def measure(
    folder: Path, ranks: int, dtype: str, rounds: int, cores: int, key: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows and raw lines.

    cores: cores of each side; one rank has that many threads. key: the option that sets the number
    of ranks.
    """
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                LLM(
                    folder, device="cpu", dtype=dtype, **{key: count},
                    num_threads=cores // count, max_num_seqs=8, max_model_len=1024,
                    kv_cache_bytes=512 << 20,
                )
            )
            for name, count in (("one", 1), ("several", ranks))
        }  # fmt: skip
        for number in range(-1, rounds):  # -1 warms up
            for case in CASES:
                for name, llm in sides.items():
                    seconds, tokens = turn(llm, case, number)
                    if number >= 0:
                        lines.append(
                            {"case": case, "side": name, "seconds": seconds, "tokens": tokens}
                        )
    return [row_of(case, lines) for case in CASES], lines


def row_of(case: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    of = {
        side: [line for line in lines if (line["case"], line["side"]) == (case, side)]
        for side in ("one", "several")
    }
    best = {side: min(line["seconds"] for line in own) for side, own in of.items()}
    pairs = [
        ours == theirs
        for mine, other in zip(of["several"], of["one"], strict=True)
        for ours, theirs in zip(mine["tokens"], other["tokens"], strict=True)
    ]
    return {
        "case": case,
        "ours": round(best["several"], 3),
        "peer": round(best["one"], 3),
        "unit": "s",
        "ratio": round(best["one"] / best["several"], 3),
        "same": round(sum(pairs) / len(pairs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--by", choices=("tensor_parallel", "pipeline_parallel"), default="tensor_parallel"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    folder = resolve_model(args.model, blocks=False)
    rows, lines = measure(folder, args.ranks, args.dtype, args.rounds, cores, args.by)
    print_ratios(rows)
    print(json.dumps({row["case"]: row["same"] for row in rows}))
    if args.out:
        settings = {args.by: args.ranks, "dtype": args.dtype, "cores": cores}
        peer = {"one": {"ranks": 1, "num_threads": cores}}
        config = {"model": args.model, "ours": settings, "peers": peer}
        write(args.out, "parallel", config, rows, lines)


if __name__ == "__main__":
    main()
