"""KV blocks that exceed the device's pool: Manta with and without tiers, and vLLM's offloading.

    python -m bench.versus.tiers --model FOLDER --name llama-8b
    python -m bench.versus.tiers --model FOLDER --sides none host disk --disk-folder /nvme/kv

FOLDER has config.json; weights are random on all sides. Every side has the same pool of
`--pool-tokens` tokens on the device. `host`, `all` (`host_kv_store: all`) and `vllm`
(`kv_offloading_size`, native) also have `--host-gib` GiB of host memory. `disk` has an eighth of
this memory, and files. Each side has its own process. vLLM runs under `--vllm-python`, if it is in
another environment. --resume adds sides to the day's lines in --out.

- `dialogue`: tokens/s, including prompts, of conversations that take turns. Together they have
  `--over` times as many tokens as the pool.
- `return`: conversations with eight times the pool's tokens continue with a fourth turn. Measured
  are the share of prompt tokens that were not computed, and the device's milliseconds per turn.
- `first`: milliseconds to the only token of a prompt of 8,192 tokens that was evicted from the
  device; `copies`: the rate of the copies meanwhile, GB/s (Manta only).
- `fresh`: tokens/s of prompts without repetition.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.report.result_file import Line, print_ratios, ratio_row, versions
from bench.versus.harness import Harness, Piece, lines_of
from bench.versus.vllm_weights import NOTE, WORKER, check_drawn

SIDES = ("host", "none", "vllm", "all", "disk")
GIB = 1 << 30
BLOCK = 16
_RETURNS = 4  # turns of the conversations of `return`, of which the last is measured
# workload -> unit; for `ms` less is better
UNITS = {
    "dialogue": "tok/s",
    "return": "ms",
    "return_hits": "share",
    "first": "ms",
    "copies": "GB/s",
    "fresh": "tok/s",
}


class Sizes(NamedTuple):
    """The sizes of the workloads, in tokens."""

    pool: int
    over: float
    opening: int  # first message of a conversation
    message: int
    answer: int  # mean length of an answer
    turns: int
    long: int  # prompt of `first`


SIZES = Sizes(90_112, 3.0, 4096, 256, 64, 12, 8192)


class Side(NamedTuple):
    """A started engine of the comparison, Manta or vLLM.

    generate: (prompts, tokens of each answer) -> (token ids, cached prompt tokens) of each.
    copied: returns (bytes, seconds) of all copies to the device so far; None = not known.
    """

    generate: Callable[[list[list[int]], list[int]], list[tuple[list[int], int]]]
    copied: Callable[[], tuple[int, float]] | None
    config: dict[str, Any]


def start_manta(side: str, model: str, sizes: Sizes, args: argparse.Namespace) -> Side:
    """Start Manta's engine, with the tiers of a side."""
    from engine import LLM, SamplingParams

    config: dict[str, Any] = {
        "device": args.device,
        "load_format": "dummy",
        "dtype": args.dtype,
        "max_model_len": longest(sizes),
        "num_blocks": sizes.pool // BLOCK,
        "max_num_seqs": args.streams,
    }
    if side != "none":
        share = 8 if side == "disk" else 1
        config["host_kv_bytes"] = int(args.host_gib * GIB) // share
    if side == "all":
        config["host_kv_store"] = "all"
    if side == "disk":
        config |= {"disk_kv_bytes": int(args.disk_gib * GIB), "disk_kv_clear": True}
        config["disk_kv_folder"] = str(args.disk_folder.resolve())
    llm = LLM(model, **config)

    def generate(prompts: list[list[int]], tokens: list[int]) -> list[tuple[list[int], int]]:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count) for count in tokens
        ]
        outputs = llm.generate(prompts, params, detokenize=False, progress=False)
        return [(list(o.outputs[0].token_ids), o.num_cached_tokens or 0) for o in outputs]

    def copied() -> tuple[int, float]:
        stats = llm.stats()
        return stats.host_kv_loaded_bytes, stats.host_kv_load_seconds

    about = {**config, "versions": versions("transformers")}
    return Side(generate, None if side == "none" else copied, about)


def start_vllm(model: str, sizes: Sizes, args: argparse.Namespace) -> Side:
    """Start vLLM's engine with its offloading to host memory."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    config: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": args.dtype,
        "max_model_len": longest(sizes),
        "num_gpu_blocks_override": sizes.pool // BLOCK,
        "block_size": BLOCK,
        "max_num_seqs": args.streams,
        "enable_prefix_caching": True,
        "kv_offloading_backend": "native",
        "kv_offloading_size": args.host_gib,
        "worker_cls": WORKER,
    }
    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=True, **config)
    check_drawn(llm)

    def generate(prompts: list[list[int]], tokens: list[int]) -> list[tuple[list[int], int]]:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in tokens
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [(list(o.outputs[0].token_ids), o.num_cached_tokens or 0) for o in outputs]

    return Side(generate, None, {**config, "weights": NOTE, "versions": versions("vllm")})


def longest(sizes: Sizes) -> int:
    """Return the maximum number of tokens of a request in any of the workloads."""
    answer = 3 * (sizes.answer // 2)  # the longest
    grown = sizes.opening + max(sizes.turns, _RETURNS) * (sizes.message + answer)
    return max(grown, sizes.long) + BLOCK


class Conversations:
    """Conversations that take turns at the same time.

    Answers have random lengths of the same mean: with equal ones, all requests of the pool would
    end in the same step, and no copy could run beside a decode.

    tokens: total tokens of all conversations after the last turn.
    """

    def __init__(self, side: Side, sizes: Sizes, tokens: float, turns: int, seed: int) -> None:
        self._side, self._sizes, self._turns = side, sizes, turns
        self._random = random.Random(seed)
        grown = sizes.opening + (turns - 1) * sizes.message + turns * sizes.answer
        self.history = [self._ids(sizes.opening) for _ in range(max(2, ceil(tokens / grown)))]
        self.tokens = 0

    def _ids(self, count: int) -> list[int]:
        return prompt_ids(self._random, count)

    def turn(self) -> tuple[float, float]:
        """Run a turn of all conversations, and append answers and new messages to the histories.

        Returns (seconds, share of the prompts' tokens that came from a cache).
        """
        least = self._sizes.answer // 2
        lengths = [least + self._random.randrange(2 * least + 1) for _ in self.history]
        began = time.perf_counter()
        answers = self._side.generate(self.history, lengths)
        seconds = time.perf_counter() - began
        asked = sum(map(len, self.history))
        for ids, (answer, _), length in zip(self.history, answers, lengths, strict=True):
            if len(answer) != length:
                raise SystemExit(f"an answer has {len(answer)} tokens, not {length}")
            ids += [*answer, *self._ids(self._sizes.message)]
        self.tokens += asked + sum(lengths)
        return seconds, sum(cached for _, cached in answers) / asked


def prompt_ids(source: random.Random, count: int) -> list[int]:
    """Return `count` random token ids that are in the vocabularies of all models of the benches."""
    return [source.randrange(100, 180) for _ in range(count)]


def measure(side: Side, sizes: Sizes) -> Iterator[tuple[str, float]]:
    """Run the workloads; yield (workload, result) of each."""
    source = random.Random(7)

    def fresh(count: int, length: int) -> list[list[int]]:
        return [prompt_ids(source, length) for _ in range(count)]

    flood = -(-sizes.pool // sizes.long) + 1
    side.generate(fresh(2, sizes.opening), [sizes.answer] * 2)  # a warm-up
    results = []
    for _ in range(2):
        prompts = fresh(max(2, sizes.pool // sizes.opening), sizes.opening)
        began = time.perf_counter()
        side.generate(prompts, [sizes.answer] * len(prompts))
        tokens = len(prompts) * (sizes.opening + sizes.answer)
        results.append(tokens / (time.perf_counter() - began))
    yield "fresh", max(results)

    talk = Conversations(side, sizes, sizes.over * sizes.pool, sizes.turns, seed=1)
    seconds = sum(talk.turn()[0] for _ in range(sizes.turns))
    yield "dialogue", talk.tokens / seconds

    many = Conversations(side, sizes, 8 * sizes.pool, _RETURNS, seed=2)
    for _ in range(_RETURNS - 1):  # a tier stores a block when it is used a second time
        many.turn()
    seconds, hits = many.turn()
    yield "return", 1000 * seconds / len(many.history)
    yield "return_hits", hits

    prompts = fresh(max(1, sizes.pool // sizes.long // 2), sizes.long)
    for _ in range(2):
        side.generate(prompts, [1] * len(prompts))
    side.generate(fresh(flood, sizes.long), [1] * flood)
    before = (0, 0.0) if side.copied is None else side.copied()
    times = []
    for ids in prompts:
        began = time.perf_counter()
        side.generate([ids], [1])
        times.append(time.perf_counter() - began)
    yield "first", 1000 * median(times)
    if side.copied is not None:
        size, seconds = (now - then for now, then in zip(side.copied(), before, strict=True))
        if seconds:
            yield "copies", size / seconds / 1e9


def run_side(side: str, args: argparse.Namespace) -> None:
    """Start a side and run its workloads; print a JSON line for each."""
    sizes = Sizes(
        args.pool_tokens, args.over, args.opening, args.message, args.answer, args.turns, args.long
    )
    model = str(args.model.resolve())
    began = time.perf_counter()
    started = (
        start_vllm(model, sizes, args)
        if side == "vllm"
        else start_manta(side, model, sizes, args)
    )  # fmt: skip
    ready_s = round(time.perf_counter() - began, 2)
    line = {"side": side, "ready_s": ready_s, "config": started.config}
    print(json.dumps(line), flush=True)
    for name, result in measure(started, sizes):
        print(json.dumps({"side": side, "workload": name, "result": round(result, 4)}), flush=True)


def rows_of(label: str, lines: Sequence[Line], ours: str) -> list[Line]:
    """Return the table's rows: for each workload, `ours` against each other side.

    A workload that no other side has run gets a row without a ratio.

    label: beginning of each case's name. lines: the sides' JSON lines. ours: the compared side.
    """
    results = {(x["side"], x["workload"]): float(x["result"]) for x in lines if "workload" in x}
    rows: list[Line] = []
    for name, unit in UNITS.items():
        mine = results.get((ours, name))
        if mine is None:
            continue
        others = [side for side in SIDES if side != ours and (side, name) in results]
        for side in others:
            row = ratio_row(f"{label}/{name}/{side}", mine, results[side, name], unit)
            rows.append(row)
        if not others:
            rows.append({"case": f"{label}/{name}", "ours": mine, "unit": unit})
    return rows


def _finished(_: Piece, lines: list[Line]) -> bool:
    return any(line.get("workload") == "first" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[:3])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pool-tokens", type=int, default=SIZES.pool)
    parser.add_argument("--host-gib", type=float, default=90.0)
    parser.add_argument("--disk-gib", type=float, default=80.0)
    parser.add_argument("--disk-folder", type=Path, default=Path("bench-kv"))
    parser.add_argument("--over", type=float, default=SIZES.over, help="times the pool")
    parser.add_argument("--opening", type=int, default=SIZES.opening)
    parser.add_argument("--message", type=int, default=SIZES.message)
    parser.add_argument("--answer", type=int, default=SIZES.answer)
    parser.add_argument("--turns", type=int, default=SIZES.turns)
    parser.add_argument("--long", type=int, default=SIZES.long)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    parser.add_argument("--side", choices=SIDES, help="run one side only, here")
    args = parser.parse_args()
    if args.side:
        run_side(args.side, args)
        return
    harness = Harness(args.out, "versus-tiers", ("side",), _finished, args.resume)

    def run_piece(piece: Piece) -> Iterator[Line]:
        python = args.vllm_python if piece[0] == "vllm" else sys.executable
        command = [python, "-m", "bench.versus.tiers", "--side", piece[0]]
        for name, value in vars(args).items():
            if name not in ("side", "sides", "out", "name", "vllm_python", "resume"):
                command += [f"--{name.replace('_', '-')}", str(value)]
        return lines_of(command)

    configs = harness.run_sides(args.sides, run_piece)
    ours = next(side for side in ("host", "all", "disk", "none") if side in configs)
    rows = rows_of(args.name, harness.raw.all, ours)
    peers = {side: config for side, config in configs.items() if side != ours}
    harness.raw.finish({"ours": configs[ours], "peers": peers}, rows)
    print_ratios([row for row in rows if "ratio" in row])


if __name__ == "__main__":
    main()
