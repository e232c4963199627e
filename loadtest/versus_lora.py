"""What adapters cost: Manta and vLLM on one GPU, each against itself without any, in turns.

    python -m loadtest.versus_lora --model FOLDER --name llama-8b --runs 2 --out loadtest/results

FOLDER needs a config.json only: weights are random on both sides, and so are the adapters, of rank
16 on all linear layers, made once in a temporary folder. The `dialogue` workload, each request with
one of N adapters drawn zipf, as many slots as adapters. A side starts once for each N, warms up,
and then runs without and with adapters in the same process; `kept` is the best output tokens/s with
them over the best without. Both sides read the same files and get the same adapter for the same
request.

A third side, `loads`, is ours alone: the times between tokens of one of 64 streams while 32
adapters are added, read, copied to the device and used once, against the times while as many
requests use one that is there.

    python -m loadtest.versus_lora --model FOLDER --name llama-8b --sides loads

Each line is kept as soon as it is there. --resume takes up the day's lines in --out and runs only
what is not there, so that the comparison fits where a command may not run for long. A side that
fails is told with the end of what it said, and the others go on.
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import AdapterError
from loadtest import workloads
from loadtest.versus_engine import MAX_MODEL_LEN, MAX_NUM_SEQS, MEMORY_FRACTION, commit

RANK = 16
TURNS = 2  # without and with adapters, in one process
WORKLOAD = "dialogue"
STREAMS, STREAM_TOKENS, LOADED = 64, 1024, 32  # of the measurement while adapters load
LOAD_SECONDS = 0.05  # from one load to the next, at least
SIDE_SECONDS = 580
# What a run's last line has, and how many of such lines it prints.
WHOLE = {"manta": ("run", 2 * TURNS), "vllm": ("run", 2 * TURNS), "loads": ("loading_p99_ms", 1)}
# Without the second vLLM wants a compiler at the start.
VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def make_adapters(model: Path, out: Path, count: int) -> None:
    """Random adapters out/a0 .. in PEFT's format."""
    import torch
    from safetensors.torch import save_file

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
    for number in range(count):
        folder = out / f"a{number}"
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (size_in, size_out) in shapes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                a = torch.randn(RANK, size_in, generator=generator) * 0.02
                b = torch.randn(size_out, RANK, generator=generator) * 0.02
                tensors[f"{prefix}.lora_A.weight"] = a.bfloat16()
                tensors[f"{prefix}.lora_B.weight"] = b.bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(fields))


def pick(count: int, requests: int) -> list[int]:
    """The adapter of each request."""
    rng = random.Random(1)
    weights = [1 / (i + 1) for i in range(count)]
    return rng.choices(range(count), weights, k=requests)


def run_manta(model: str, adapters: Path, count: int) -> None:
    """One process; prints a JSON line for each run."""
    from engine import LLM, SamplingParams

    requests = workloads.build(WORKLOAD)
    prompts = [ids for ids, _ in requests]
    names = [f"a{i}" for i in pick(count, len(requests))]
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for _, n in requests]
    config: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "memory_fraction": MEMORY_FRACTION,
        "prefix_caching": False,
        "max_loras": count,
        "max_lora_rank": RANK,
        "lora_host_bytes": 16 << 30,
    }
    with LLM(model, **config) as llm:
        _print(side="manta", adapters=count, config=config, phases=llm.ready.start_seconds)
        for number in range(count):
            llm.add_adapter(f"a{number}", adapters / f"a{number}")
        warm = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)] * len(set(names))
        llm.generate(prompts[: len(warm)], warm, adapter=sorted(set(names)), detokenize=False)
        for _ in range(TURNS):
            for label, chosen in (("none", ""), ("adapters", names)):
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, adapter=chosen, detokenize=False)
                seconds = time.perf_counter() - start
                counts = [len(o.outputs[0].token_ids) for o in outputs]
                _report("manta", count, label, requests, counts, seconds)
        _print(side="manta", adapters=count, loads=llm.stats().adapter_loads)


def run_vllm(model: str, adapters: Path, count: int) -> None:
    """The same for vLLM, with its defaults but for what must be equal."""
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
        "enable_lora": True,
        "max_loras": count,
        "max_cpu_loras": count,
        "max_lora_rank": RANK,
    }
    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=True, **config)
    _print(side="vllm", adapters=count, config=config)
    short = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8, detokenize=False)
    llm.generate(prompts[:count], [short] * count, use_tqdm=False, lora_request=known)
    for _ in range(TURNS):
        for label, lora in (("none", None), ("adapters", chosen)):
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
            seconds = time.perf_counter() - start
            counts = [len(o.outputs[0].token_ids) for o in outputs]
            _report("vllm", count, label, requests, counts, seconds)


def run_loads(model: str, adapters: Path, count: int, streams: int, config: dict[str, Any]) -> None:
    """One process; prints the percentiles of the times between tokens, quiet and while loading.

    config: of the engine, beyond what is the same everywhere.
    """
    from engine import LLM, SamplingParams

    prompts = [ids for ids, _ in workloads.build(WORKLOAD)][:streams]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=STREAM_TOKENS)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    fixed = {"dtype": "bfloat16", "prefix_caching": False, "max_loras": 8, "max_lora_rank": RANK}
    with LLM(model, **fixed, **config) as llm:
        llm.add_adapter("there", adapters / "a0")
        llm.generate(prompts, params, detokenize=False)

        def disturb(load: bool, done: threading.Event) -> None:
            """Add each adapter and use it once, so that it goes to the device and others leave it;
            or use one that is there."""
            for number in range(count):
                began = time.perf_counter()
                if load:
                    llm.add_adapter(f"a{number}", adapters / f"a{number}")
                name = f"a{number}" if load else "there"
                llm.generate([prompts[0][:8]], one, adapter=name, detokenize=False)
                if done.wait(max(0.0, began + LOAD_SECONDS - time.perf_counter())):
                    return

        gaps: dict[str, list[float]] = {"quiet": [], "loading": []}
        for _ in range(TURNS):
            for label, times in gaps.items():
                handles = [llm.start_request(ids, params, detokenize=False) for ids in prompts]
                done = threading.Event()
                other = threading.Thread(target=disturb, args=(label == "loading", done))
                last = 0.0
                for number, _ in enumerate(handles[0]):
                    now = time.perf_counter()
                    if number == 16:
                        other.start()
                    if number > 16 and other.is_alive():
                        times.append(now - last)
                    last = now
                for handle in handles:
                    handle.sync()
                    handle.release()
                done.set()
                other.join()
            for number in range(count):
                with contextlib.suppress(AdapterError):  # the streams ended before its turn came
                    llm.remove_adapter(f"a{number}")
        figures = {
            f"{label}_{name}_ms": round(sorted(times)[int(len(times) * share)] * 1e3, 3)
            for label, times in gaps.items()
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        _print(
            side="loads",
            adapters=count,
            config=fixed | config,
            loads=llm.stats().adapter_loads,
            gaps={label: len(times) for label, times in gaps.items()},
            **figures,
        )


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


def run_side(command: list[str], keep: Callable[[dict[str, Any]], None]) -> None:
    """Run a side in a process of its own; keep each JSON line that it prints when it comes.

    Raises SideFailed with the cause and the end of the log.
    """
    environment = VLLM_ENVIRONMENT | os.environ
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        # An engine's own processes too, which would keep the device's memory.
        timer = threading.Timer(SIDE_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        said: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                keep(json.loads(line))
            else:
                said.append(line)
        code = process.wait()
        timer.cancel()
        if code:
            log.seek(0)
            raise SideFailed(f"exit code {code}\n{explain([*said, *log])}")


class SideFailed(Exception):
    """A side ended before it was done."""


def explain(lines: list[str]) -> str:
    """The line that names the cause, and the last 40.

    The first exception is the cause: what comes after it tells of the processes that waited.
    """
    error = re.compile(r"(?:^|\s)(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt): \S")
    cause = next((line.strip() for line in lines if error.search(line)), "no exception was printed")
    return "".join([f"cause: {cause}\n", *lines[-40:]])


def wait_for_device() -> None:
    """Until the memory of the side before is free."""
    for _ in range(30):
        used = ask_device("memory.used")
        if not used.isdigit() or int(used) < 2000:
            return
        time.sleep(1)


def ask_device(what: str) -> str:
    """A property of the first GPU, without a context on it; "" if there is none."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.splitlines()[0].strip()


def whole_runs(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the lines of runs that were cut off."""
    counts = Counter(
        (line["side"], line["adapters"], line["start"])
        for line in lines
        if WHOLE[line["side"]][0] in line
    )
    return [
        line
        for line in lines
        if counts[line["side"], line["adapters"], line["start"]] >= WHOLE[line["side"]][1]
    ]


def rows_of(label: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of whole runs: <label>/<adapters>, and <label>/loads, with what is there."""
    rows = []
    for count in sorted({line["adapters"] for line in lines if line["side"] != "loads"}):
        row: dict[str, Any] = {"case": f"{label}/{count}", "unit": "tok/s"}
        for side, name, kept in (("manta", "ours", "kept"), ("vllm", "peer", "peer_kept")):
            runs: dict[str, list[float]] = {"none": [], "adapters": []}
            for line in lines:
                if (line["side"], line["adapters"]) == (side, count) and "run" in line:
                    runs[line["run"]].append(line["out_tok_s"])
            if all(runs.values()):
                row[f"{name}_base"], row[name] = max(runs["none"]), max(runs["adapters"])
                row[kept] = round(row[name] / row[f"{name}_base"], 3)
        if "kept" in row and "peer_kept" in row:
            row["ratio"] = round(row["ours"] / row["peer"], 3)
        rows.append(row)
    loads = [line for line in lines if line["side"] == "loads"]
    if loads:
        best = min(loads, key=lambda line: line["loading_p99_ms"] / line["quiet_p99_ms"])
        ratio = round(best["loading_p99_ms"] / best["quiet_p99_ms"], 3)
        quiet, loading = best["quiet_p99_ms"], best["loading_p99_ms"]
        row = {"case": f"{label}/loads", "unit": "ms", "quiet_p99": quiet, "loading_p99": loading}
        rows.append(row | {"ratio": ratio})
    return rows


def compare(args: argparse.Namespace) -> bool:
    """Alternate the sides; print the shares and keep them in <out>/versus-lora-<date>.json, and the
    lines in .jsonl. Returns whether all has worked."""
    args.out.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    raw = args.out / f"versus-lora-{today}.jsonl"
    there = raw.read_text().splitlines() if args.resume and raw.exists() else []
    lines = whole_runs([json.loads(line) for line in there])
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    good = True
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(Path(args.model), Path(folder), max([*args.counts, LOADED]))
        plan = [
            (LOADED if side == "loads" else count, start, side)
            for count in args.counts
            for start in range(args.runs)
            for side in args.sides
        ]
        for count, start, side in dict.fromkeys(plan):
            key = (side, count, start)
            if key in {(line["side"], line["adapters"], line["start"]) for line in lines}:
                continue

            def keep(line: dict[str, Any], start: int = start) -> None:
                line["start"] = start
                lines.append(line)
                print(json.dumps(line), flush=True)
                with raw.open("a") as file:
                    file.write(json.dumps(line) + "\n")

            command = [sys.executable, "-m", "loadtest.versus_lora", "--side", side]
            command += ["--model", args.model, "--adapters", folder, "--counts", str(count)]
            wait_for_device()
            try:
                run_side(command, keep)
            except SideFailed as failure:
                good = False
                print(f"{side} with {count} adapters failed: {failure}", flush=True)
            _write(args.name, whole_runs(lines), raw)
    for row in rows_of(args.name, whole_runs(lines)):
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    return good


def _write(label: str, lines: list[dict[str, Any]], raw: Path) -> None:
    configs = {line["side"]: line["config"] for line in lines if "config" in line}
    document = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": ask_device("name") or "cpu",
        "config": {"ours": configs.get("manta"), "peers": {"vllm": configs.get("vllm")}},
        "rows": rows_of(label, lines),
    }
    raw.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 16, 64], help="adapters")
    parser.add_argument("--runs", type=int, default=1, help="alternating starts of each side")
    parser.add_argument(
        "--sides", nargs="+", choices=list(WHOLE), default=["manta", "vllm", "loads"]
    )
    parser.add_argument("--out", type=Path, default=Path("loadtest/results"))
    parser.add_argument("--resume", action="store_true", help="keep the day's lines in --out")
    parser.add_argument("--side", choices=list(WHOLE), help="run one side only, here")
    parser.add_argument("--adapters", type=Path, help="for --side: where they are")
    args = parser.parse_args()
    if args.side == "manta":
        run_manta(args.model, args.adapters, args.counts[0])
    elif args.side == "vllm":
        run_vllm(args.model, args.adapters, args.counts[0])
    elif args.side == "loads":
        config = {
            "load_format": "dummy",
            "max_model_len": MAX_MODEL_LEN,
            "memory_fraction": MEMORY_FRACTION,
            "lora_host_bytes": 16 << 30,
        }
        run_loads(args.model, args.adapters, args.counts[0], STREAMS, config)
    elif not compare(args):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
