"""The cost of adapters: Manta and vLLM on one GPU, each against itself without adapters.

    python -m bench.versus.lora --model FOLDER --name llama-8b --resume

FOLDER needs only a config.json: weights are random on both sides. Adapters are also random, of rank
16 on all linear layers, in a temporary folder. The workload is `dialogue`. Each request has one of
N Zipf-distributed adapters; there are as many slots as adapters. N = 0 is an engine without LoRA.
For other N a side starts once, warms up, and runs with adapters, without, and with adapters in one
process. `kept` is the best output tokens/s with adapters divided by the side's best without,
including N = 0: unused slots must cost nothing. Both sides read the same files and give each
request the same adapter.

A third side, `loads`, is only Manta: inter-token times of one of 64 streams while 32 adapters are
added, read, copied to the device and used once, against the times while as many requests, equally
spaced, use a loaded adapter.

Each line is saved immediately. For environments that limit a command's duration: no piece is
started that is not expected to end within --seconds, and --resume continues from the day's lines in
--out. The exit code is 3 while pieces are missing. If a side fails, the end of its output is
printed, the other sides continue, and the exit code is 1.

--cpu tries Manta's sides without a GPU, with a small model (with a vocabulary of 32,000 tokens) and
a few short requests.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import lora_loads
from bench.report.result_file import Line, ask_device, versions
from bench.versus.engine import MAX_MODEL_LEN, MAX_NUM_SEQS, MEMORY_FRACTION
from bench.versus.harness import Harness, Piece, lines_of
from loadtest.scenario import workloads

RANK = 16
WORKLOAD = "dialogue"
# runs of one process: of an engine without LoRA, and of an engine with adapters
OFF, ON = ("none", "none"), ("adapters", "none", "adapters")
STREAMS, STREAM_TOKENS, LOADED = 64, 4096, 32  # load of the measurement while adapters load
LOAD_SECONDS = 0.4  # minimum seconds between two loads
SIDES = ("manta", "vllm", "loads")
# Seconds for llama-8b on an H200: start and warm-up, a run without adapters, a run with 64.
EXPECTED = {"manta": (60, 20, 26), "vllm": (75, 20, 45)}
EXPECTED_LOADS = 125
WRITE_SECONDS = 0.25  # seconds to write an adapter's files, 84 MB
TRIAL_REQUESTS, TRIAL_TOKENS = 24, 8  # load with --cpu
TRIAL_LOADED = lora_loads.SLOTS + 2  # adapters of the side `loads` with --cpu
# Without the second variable vLLM needs a compiler at its start.
VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def runs_of(side: str, count: int) -> tuple[str, ...]:
    """Return the names of the runs in a side's process with `count` adapters.

    The side `loads` has a single run.
    """
    if side == "loads":
        return ("loads",)
    return ON if count else OFF


def expected_seconds(side: str, count: int) -> int:
    """Return the expected seconds of a side's process."""
    if side == "loads":
        return EXPECTED_LOADS
    start, without, full = EXPECTED[side]
    return start + sum(without if run == "none" else full for run in runs_of(side, count))


def writing_seconds(count: int, made: int) -> int:
    """Return the expected seconds to make the missing adapters. made: the number that exists."""
    return round(max(0, count - made) * WRITE_SECONDS)


def engine_config(cpu: bool) -> dict[str, Any]:
    """Return the engine configuration of Manta's sides."""
    config: dict[str, Any] = {"load_format": "dummy", "prefix_caching": False}
    if cpu:
        return config | {"device": "cpu", "dtype": "float32", "num_blocks": 1024}
    return config | {
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "memory_fraction": MEMORY_FRACTION,
        "lora_host_bytes": 16 << 30,
    }


def build_requests(cpu: bool) -> list[workloads.Request]:
    requests = workloads.build(WORKLOAD)
    if cpu:
        return [(ids[:16], TRIAL_TOKENS) for ids, _ in requests[:TRIAL_REQUESTS]]
    return requests


def make_adapters(model: Path, out: Path, made: int, count: int) -> int:
    """Make random adapters out/a<made> .. out/a<count - 1> in PEFT's format.

    Returns the number of existing adapters.
    """
    if count <= made:
        return made
    import torch
    from safetensors.torch import save_file

    # With 64 threads, thousands of small copies would take minutes and slow down running sides.
    torch.set_num_threads(1)

    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    query, keys = dim * heads, dim * config.get("num_key_value_heads", heads)
    shapes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": [name.split(".")[1] for name in shapes],
        "base_model_name_or_path": str(model),
    }
    # Use slices of one random tensor, as drawing billions of numbers would take longer than the
    # comparison.
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(1 << 24, generator=generator) * 0.02).bfloat16()

    def draw(*shape: int) -> torch.Tensor:
        size = shape[0] * shape[1]
        at = int(torch.randint(len(pool) - size, (1,), generator=generator))
        return pool[at : at + size].view(shape).clone()

    for number in range(made, count):
        folder = out / f"a{number}"
        folder.mkdir(parents=True)
        generator.manual_seed(number)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (size_in, size_out) in shapes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = draw(RANK, size_in)
                tensors[f"{prefix}.lora_B.weight"] = draw(size_out, RANK)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(fields))
    return count


def pick(count: int, requests: int) -> list[int]:
    """Return the adapter's number for each request, or [] without adapters."""
    if not count:
        return []
    rng = random.Random(1)
    weights = [1 / (i + 1) for i in range(count)]
    return rng.choices(range(count), weights, k=requests)


def run_manta(model: str, adapters: Path, count: int, cpu: bool) -> None:
    """Run Manta's side in this process; print a JSON line for each run."""
    from engine import LLM, SamplingParams

    requests = build_requests(cpu)
    prompts = [ids for ids, _ in requests]
    names = [f"a{i}" for i in pick(count, len(requests))]
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for _, n in requests]
    config = engine_config(cpu) | {"max_num_seqs": 16 if cpu else MAX_NUM_SEQS}
    if count:
        config |= {"max_loras": count, "max_lora_rank": RANK}
    with LLM(model, **config) as llm:
        _print(side="manta", adapters=count, config=config, phases=llm.ready.start_seconds)
        for number in range(count):
            llm.add_adapter(f"a{number}", adapters / f"a{number}")
        used = sorted(set(names)) or [""]
        warm = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)] * len(used)
        llm.generate(prompts[: len(warm)], warm, adapter=used, detokenize=False)
        for label in runs_of("manta", count):
            chosen = names if label == "adapters" else ""
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, adapter=chosen, detokenize=False)
            seconds = time.perf_counter() - start
            counts = [len(o.outputs[0].token_ids) for o in outputs]
            _report("manta", count, label, requests, counts, seconds)
        _print(side="manta", adapters=count, loads=llm.stats().adapter_loads)


def run_vllm(model: str, adapters: Path, count: int) -> None:
    """Run vLLM's side in this process; print a JSON line for each run.

    Settings are vLLM's defaults, except those that must equal Manta's.
    """
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    requests = workloads.build(WORKLOAD)
    prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
    known = [LoRARequest(f"a{i}", i + 1, str(adapters / f"a{i}")) for i in range(count)]
    chosen = [known[i] for i in pick(count, len(requests))]
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False)
        for _, n in requests
    ]
    config: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "gpu_memory_utilization": MEMORY_FRACTION,
        "enable_prefix_caching": False,
    }
    if count:
        config |= {
            "enable_lora": True,
            "max_loras": count,
            "max_cpu_loras": count,
            "max_lora_rank": RANK,
        }
    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=True, **config)
    _print(side="vllm", adapters=count, config=config)
    short = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8, detokenize=False)
    warm = prompts[: max(count, 1)]
    llm.generate(warm, [short] * len(warm), use_tqdm=False, lora_request=known or None)
    for label in runs_of("vllm", count):
        lora = chosen if label == "adapters" else None
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
        seconds = time.perf_counter() - start
        counts = [len(o.outputs[0].token_ids) for o in outputs]
        _report("vllm", count, label, requests, counts, seconds)


def run_loads(model: str, adapters: Path, count: int, cpu: bool) -> None:
    """Run the side `loads` in this process, and print percentiles of inter-token times."""
    streams, tokens, interval = (4, 64, 0.0) if cpu else (STREAMS, STREAM_TOKENS, LOAD_SECONDS)
    prompts = [ids for ids, _ in build_requests(cpu)][:streams]
    config = engine_config(cpu) | {"max_loras": lora_loads.SLOTS, "max_lora_rank": RANK}
    figures = lora_loads.measure(model, config, prompts, tokens, adapters, count, interval)
    _print(side="loads", adapters=count, config=config, **figures)


def _report(
    side: str,
    adapters: int,
    label: str,
    requests: list[workloads.Request],
    counts: list[int],
    seconds: float,
) -> None:
    if counts != [wanted for _, wanted in requests]:
        raise SystemExit(f"{side} {label}: a request did not give the tokens it was asked for")
    _print(
        side=side,
        adapters=adapters,
        run=label,
        seconds=round(seconds, 3),
        out_tok_s=round(sum(counts) / seconds, 1),
    )


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def wait_for_device() -> None:
    """Wait until the previous side's memory is free."""
    for _ in range(30):
        used = ask_device("memory.used")
        if not used.isdigit() or int(used) < 2000:
            return
        time.sleep(1)


def finished(piece: Piece, lines: list[Line]) -> bool:
    """Whether a side's process completed its runs. piece: side, adapters, number of the start."""
    count = sum("run" in line or "loading_p99_ms" in line for line in lines)
    return count >= len(runs_of(*piece[:2]))


def rows_of(label: str, lines: list[Line]) -> list[dict[str, Any]]:
    """Compute the rows <label>/<adapters> and <label>/loads from complete runs.

    *_none: the speed with as many adapter slots, none in use.
    """

    def best(side: str, run: str, count: int | None = None) -> float | None:
        speeds = [
            line["out_tok_s"]
            for line in lines
            if line["side"] == side and line.get("run") == run and count in (None, line["adapters"])
        ]
        return max(speeds, default=None)

    rows = []
    for count in sorted({line["adapters"] for line in lines if line["side"] != "loads"}):
        row: dict[str, Any] = {"case": f"{label}/{count}", "unit": "tok/s"}
        for side, name, shares in (("manta", "ours", "kept"), ("vllm", "peer", "peer_kept")):
            base, none, used = best(side, "none"), best(side, "none", count), None
            if count:
                used = best(side, "adapters", count)
            elif none is not None:
                row[name] = none
            if base and used and none:
                figures = {f"{name}_base": base, f"{name}_none": none, name: used}
                row |= figures | {shares: round(used / base, 3)}
        if "ours" in row and "peer" in row:
            row["ratio"] = round(row["ours"] / row["peer"], 3)
        rows.append(row)
    loads = [line for line in lines if line["side"] == "loads"]
    if loads:
        best_line = min(loads, key=lambda line: line["loading_p99_ms"] / line["quiet_p99_ms"])
        quiet, loading = best_line["quiet_p99_ms"], best_line["loading_p99_ms"]
        row = {"case": f"{label}/loads", "unit": "ms", "quiet_p99": quiet, "loading_p99": loading}
        rows.append(row | {"ratio": round(loading / quiet, 3)})
    return rows


def plan(args: argparse.Namespace) -> list[Piece]:
    """Return the pieces, with alternating sides and cases without adapters first."""
    loaded = TRIAL_LOADED if args.cpu else LOADED
    pieces: list[Piece] = [
        (side, loaded if side == "loads" else count, start)
        for count in sorted(args.counts)
        for start in range(args.runs)
        for side in args.sides
    ]
    # `loads` comes last, as no peer is compared with it.
    return sorted(dict.fromkeys(pieces), key=lambda piece: piece[0] == "loads")


def compare(args: argparse.Namespace) -> int:
    """Alternate the sides and print each side's `kept`; return the exit code.

    Writes <out>/versus-lora-<date>.json, and the lines in .jsonl.
    """
    end = time.monotonic() + args.seconds
    fields = ("side", "adapters", "start")
    harness = Harness(args.out, "versus-lora", fields, finished, args.resume)
    pieces, num_made = plan(args), 0
    for side, count, _ in harness.missing(pieces):
        print(f"to do: {side} with {count} adapters, ~{expected_seconds(side, count)} s")
    with tempfile.TemporaryDirectory() as folder:

        def expected(piece: Piece) -> float:
            side, count, _ = piece
            return (
                0.0
                if args.cpu
                else writing_seconds(count, num_made) + expected_seconds(side, count)
            )

        def run_piece(piece: Piece) -> Iterator[Line]:
            nonlocal num_made
            side, count, _ = piece
            num_made = make_adapters(Path(args.model), Path(folder), num_made, count)
            command = [sys.executable, "-m", "bench.versus.lora", "--side", side]
            command += ["--model", args.model, "--adapters", folder, "--counts", str(count)]
            command += ["--cpu"] * args.cpu
            wait_for_device()
            seconds = max(60.0, end - time.monotonic())
            yield from lines_of(command, None, VLLM_ENVIRONMENT | os.environ, seconds)

        seconds = math.inf if args.cpu else args.seconds
        unstarted, failed = harness.run(pieces, run_piece, expected, seconds, go_on=True)
    lines = harness.lines
    configs = {line["side"]: line["config"] for line in lines if "config" in line}
    ours = {side: configs[side] for side in ("manta", "loads") if side in configs}
    peers = {"vllm": configs["vllm"]} if "vllm" in configs else {}
    rows = rows_of(args.name, lines)
    harness.raw.finish({"ours": ours, "peers": peers, "versions": versions("vllm")}, rows)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    return 1 if failed else 3 if unstarted else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument(
        "--counts", nargs="+", type=int, default=[0, 1, 16, 64], help="adapters; 0 = without LoRA"
    )
    parser.add_argument("--runs", type=int, default=1, help="alternating starts of each side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="default all")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="keep the day's lines in --out")
    parser.add_argument("--seconds", type=float, default=560.0, help="to be over after these")
    parser.add_argument("--cpu", action="store_true", help="a trial of ours without a GPU")
    parser.add_argument("--side", choices=SIDES, help="run one side only, here")
    parser.add_argument("--adapters", type=Path, help="for --side: where they are")
    args = parser.parse_args()
    args.sides = args.sides or (["manta", "loads"] if args.cpu else list(SIDES))
    if args.side == "manta":
        run_manta(args.model, args.adapters, args.counts[0], args.cpu)
    elif args.side == "vllm":
        run_vllm(args.model, args.adapters, args.counts[0])
    elif args.side == "loads":
        run_loads(args.model, args.adapters, args.counts[0], args.cpu)
    else:
        sys.exit(compare(args))


if __name__ == "__main__":
    main()
