"""What adapters cost: Manta and vLLM on one GPU, each against itself without any, in turns.

    python -m loadtest.versus_lora --model FOLDER --name llama-8b --runs 2 --out loadtest/results

FOLDER needs a config.json only: weights are random on both sides, and so are the adapters, of rank
16 on all linear layers, made once in a temporary folder. The `dialogue` workload, each request with
one of N adapters drawn zipf, as many slots as adapters. A side starts once for each N, warms up,
and then runs without and with adapters in the same process; `kept` is the best output tokens/s with
them over the best without. Both sides read the same files and get the same adapter for the same
request.

    python -m loadtest.versus_lora --model FOLDER --name llama-8b --sides loads

measures one of 64 streams, of ours alone: its times between tokens while 32 adapters are added,
read and copied to the device, against the times while nothing is.
"""

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from loadtest import workloads
from loadtest.versus_engine import MAX_MODEL_LEN, MAX_NUM_SEQS, MEMORY_FRACTION, commit

RANK = 16
TURNS = 2  # without and with adapters, in one process
WORKLOAD = "dialogue"
STREAMS, STREAM_TOKENS, LOADED = 64, 1024, 32  # of the measurement while adapters load


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
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
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


def run_loads(model: str, adapters: Path, count: int) -> None:
    """One process; prints the percentiles of the times between tokens, quiet and while loading."""
    from engine import LLM, SamplingParams

    prompts = [ids for ids, _ in workloads.build(WORKLOAD)][:STREAMS]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=STREAM_TOKENS)
    with LLM(
        model,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        memory_fraction=MEMORY_FRACTION,
        prefix_caching=False,
        max_loras=8,
        max_lora_rank=RANK,
        lora_host_bytes=16 << 30,
    ) as llm:
        llm.generate(prompts, params, detokenize=False)

        def load() -> None:
            """Add each, and use it once, so that it goes to the device and others leave it."""
            one = SamplingParams(temperature=0.0, max_tokens=1)
            for number in range(count):
                llm.add_adapter(f"a{number}", adapters / f"a{number}")
                llm.generate([prompts[0][:8]], one, adapter=f"a{number}", detokenize=False)

        gaps: dict[str, list[float]] = {"quiet": [], "loading": []}
        for _ in range(TURNS):
            for label, times in gaps.items():
                handles = [llm.start_request(ids, params, detokenize=False) for ids in prompts]
                loader = threading.Thread(target=load)
                last = 0.0
                for number, _ in enumerate(handles[0]):
                    now = time.perf_counter()
                    if number == 16 and label == "loading":
                        loader.start()
                    if number > 16:
                        times.append(now - last)
                    last = now
                if label == "loading":
                    loader.join()
                    for name in range(count):
                        llm.remove_adapter(f"a{name}")
                for handle in handles:
                    handle.sync()
                    handle.release()
        ms = {
            f"{label}_{name}_ms": round(sorted(times)[int(len(times) * share)] * 1e3, 3)
            for label, times in gaps.items()
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        _print(side="loads", adapters=count, loads=llm.stats().adapter_loads, **ms)


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


def _run_side(side: str, model: str, adapters: Path, count: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "loadtest.versus_lora", "--side", side, "--model", model]
    done = subprocess.run(
        [*command, "--adapters", str(adapters), "--counts", str(count)],
        stdout=subprocess.PIPE,
        timeout=580,
        check=True,
    )
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    for line in lines:
        print(line, flush=True)
    return [json.loads(line) for line in lines]


def _best(lines: list[dict[str, Any]], side: str, count: int, run: str) -> float:
    return max(
        line["out_tok_s"]
        for line in lines
        if (line["side"], line["adapters"], line.get("run")) == (side, count, run)
    )


def compare(
    model: str, label: str, counts: list[int], runs: int, out: Path, sides: list[str]
) -> None:
    """Alternate the sides, print the shares, write <out>/versus-lora-<date>.json and .jsonl."""
    import torch

    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        adapters = Path(folder)
        make_adapters(Path(model), adapters, max(counts))
        for count in counts:
            for _ in range(runs):
                for side in sides:
                    lines += _run_side(side, model, adapters, count)
    rows = []
    for count in counts:
        row: dict[str, Any] = {"case": f"{label}/{count}", "unit": "tok/s"}
        for side, name, kept in (("manta", "ours", "kept"), ("vllm", "peer", "peer_kept")):
            if side in sides:
                row[f"{name}_base"] = _best(lines, side, count, "none")
                row[name] = _best(lines, side, count, "adapters")
                row[kept] = round(row[name] / row[f"{name}_base"], 3)
        if len(sides) == 2:
            row["ratio"] = round(row["ours"] / row["peer"], 3)
        rows.append(row)
    configs = {
        side: [li["config"] for li in lines if li["side"] == side and "config" in li][0:1]
        for side in sides
    }
    document = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "config": {"ours": configs.get("manta"), "peers": {"vllm": configs.get("vllm")}},
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    stem = f"versus-lora-{document['date']}"
    (out / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 16, 64], help="adapters")
    parser.add_argument("--runs", type=int, default=1, help="alternating starts of each side")
    parser.add_argument(
        "--sides", nargs="+", choices=["manta", "vllm", "loads"], default=["manta", "vllm"]
    )
    parser.add_argument("--out", type=Path, default=Path("loadtest/results"))
    parser.add_argument("--side", choices=["manta", "vllm"], help="run one side only, here")
    parser.add_argument("--adapters", type=Path, help="for --side: where they are")
    args = parser.parse_args()
    if args.side == "manta":
        run_manta(args.model, args.adapters, args.counts[0])
    elif args.side == "vllm":
        run_vllm(args.model, args.adapters, args.counts[0])
    elif args.sides == ["loads"]:
        with tempfile.TemporaryDirectory() as folder:
            make_adapters(Path(args.model), Path(folder), LOADED)
            run_loads(args.model, Path(folder), LOADED)
    else:
        compare(args.model, args.name, args.counts, args.runs, args.out, args.sides)


if __name__ == "__main__":
    main()
