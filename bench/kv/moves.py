"""The time to first token of a prompt whose KV blocks are moved from another replica, against the
time on the replica that has the blocks.

    python -m bench.kv.moves --model FOLDER --name llama-8b --out bench/results

FOLDER has config.json; weights are random. Two engines with `kv_moves` run on one machine; if there
are two GPUs, each has its own. For each prompt of `--tokens` tokens it measures the milliseconds to
the first token

- `computed`: at the first engine, which has no block of the prompt;
- `warm`: at the first engine again, which has all blocks in its prefix cache;
- `moved`: at the second engine, which pulls the blocks from the first.

Blocks are moved by three transports in turns: from the memory of the first engine's GPU, by host
memory, and over TCP. `--way` selects one; the CPU lacks the first. `rate` is the bytes moved
divided by the seconds of the moves, GB/s. Rows compare medians. The run ends with an error if
blocks are moved by another transport, or if more than one block of the prompt is missing.
"""

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.report.result_file import Line, RawLines, print_ratios, ratio_row, versions
from engine.config.engine_config import EngineConfig
from engine.messages import EngineRequest, EngineStats, KVSource, StepFrame
from engine.process.client import EngineClient
from engine.sampling_params import SamplingParams

BLOCK = 16
WAYS = ("gpu", "shm", "tcp")


class Replica:
    """An engine in its own process, with the measurement of its times to first token."""

    def __init__(self) -> None:
        self._client = EngineClient(self._read_frame)
        self._ends: dict[int, asyncio.Future[float]] = {}
        self._number = 0

    async def start(self, config: EngineConfig, gpu: str | None) -> None:
        """Start the process. gpu: index of its GPU; None: any."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            await self._client.start(config)
        finally:
            if gpu is not None:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                if visible is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible

    async def source(self) -> KVSource:
        """Let the engine listen for pulls of blocks; return its address and secret."""
        source, _ = await self._client.serve_kv("127.0.0.1")
        return source

    async def first_token(self, prompt: list[int], source: KVSource | None = None) -> float:
        """Return the milliseconds until a request of one token has ended.

        source: the engine from which to pull the prompt's blocks, or None.
        """
        self._number += 1
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
        end = self._ends[self._number] = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self._client.submit(
            EngineRequest(self._number, prompt, len(prompt), params, seed=0, source=source)
        )
        return 1000 * (await end - start)

    async def stats(self) -> EngineStats:
        self._client.control("stats")
        await asyncio.sleep(0.2)
        return self._client.stats

    async def close(self) -> None:
        await self._client.close()

    def _read_frame(self, frame: StepFrame) -> None:
        now = time.perf_counter()
        for delta in frame.deltas:
            end = self._ends.pop(delta.id, None) if delta.finish else None
            if end is not None and delta.finish == "error":
                end.set_exception(RuntimeError(str(delta)))
            elif end is not None:
                end.set_result(now)


async def measure(args: argparse.Namespace, raw: RawLines) -> dict[str, Any]:
    """Run all prompts and save their lines; return the engines' configuration."""
    import torch

    settings: dict[str, Any] = {
        "device": args.device,
        "load_format": "dummy",
        "dtype": args.dtype,
        "max_model_len": args.tokens + 2 * BLOCK,
        "max_num_seqs": 16,
        "num_blocks": (args.prompts + 2) * len(args.ways) * (args.tokens // BLOCK + 2),
        "block_size": BLOCK,
        "kv_moves": True,
    }
    config = EngineConfig(model=args.model, **settings)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    replicas = [Replica(), Replica()]
    names = [str(at % gpus) if gpus else None for at in range(2)]
    rng = random.Random(0)
    try:
        for replica, gpu in zip(replicas, names, strict=True):
            await replica.start(config, gpu)
        first, second = replicas
        source = await first.source()
        before = await second.stats()
        turns = [(number, way) for number in range(args.prompts + 1) for way in args.ways]
        for number, way in turns:
            prompt = [rng.randrange(10, args.vocabulary) for _ in range(args.tokens)]
            line: Line = {"prompt": number, "way": way, "tokens": args.tokens}
            line["computed"] = await first.first_token(prompt)
            line["warm"] = await first.first_token(prompt)
            named = msgspec.structs.replace(source, shared=way != "tcp", device=way == "gpu")
            line["moved"] = await second.first_token(prompt, named)
            after = await second.stats()
            by = (
                after.shared_moves - before.shared_moves,
                after.device_moves - before.device_moves,
            )
            if by != (way != "tcp", way == "gpu"):
                raise SystemExit(f"blocks did not go by {way}: see the engine's log")
            tokens = after.moved_tokens - before.moved_tokens
            if tokens < args.tokens - 2 * BLOCK:
                raise SystemExit(f"of {args.tokens} tokens {tokens} moved")
            seconds = after.move_seconds - before.move_seconds
            line["rate"] = (after.moved_bytes - before.moved_bytes) / seconds / 1e9
            before = after
            if number:  # the first round is a warm-up
                raw.keep({k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()})
    finally:
        for replica in replicas:
            await replica.close()
    return {**settings, "gpus": len(set(names)) if gpus else 0}


def rows_of(name: str, lines: list[Line]) -> list[Line]:
    """Compute the rows: <name>/<way>/<case> in ms, and <name>/<way>-of-tcp in GB/s (medians)."""
    by_way = {way: [line for line in lines if line["way"] == way] for way in WAYS}
    rows = [
        ratio_row(
            f"{name}/{way}/moved-of-{case}",
            median(line["moved"] for line in by_way[way]),
            median(line[case] for line in by_way[way]),
            "ms",
        )
        for way in WAYS
        for case in ("warm", "computed")
        if by_way[way]
    ]
    rates = {way: median(line["rate"] for line in ways) for way, ways in by_way.items() if ways}
    for way in WAYS[:-1]:
        if way in rates and "tcp" in rates:
            rows.append(ratio_row(f"{name}/{way}-of-tcp", rates[way], rates["tcp"], "GB/s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=10, help="by each way")
    parser.add_argument("--way", choices=WAYS, help="of the blocks; default: all in turns")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    args.ways = [args.way] if args.way else WAYS[args.device == "cpu" :]
    args.model = str(Path(args.model).resolve())
    args.vocabulary = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    raw = RawLines(args.out, "kv-moves")
    config = asyncio.run(measure(args, raw))
    rows = rows_of(args.name, raw.all)
    rates = {
        way: round(median(line["rate"] for line in raw.all if line["way"] == way), 2)
        for way in args.ways
    }
    raw.finish({"ours": {**config, "versions": versions()}, "median_rates_gb_s": rates}, rows)
    print_ratios(rows)


if __name__ == "__main__":
    main()
