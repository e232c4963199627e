"""Loading speed: weights from files against a plain copy, and engine starts against vLLM's.

Weights are loaded from files in the page cache to the device, against a copy of as many bytes from
host memory. Engine starts are timed until ready, against vLLM with its default loader.

    python -m bench.loading --gb 16 --out bench/results          # on the machine with the GPU
    python -m bench.loading --device cpu --gb 1 --cases dense moe

It makes files with random weights in --folder, removed afterwards, and reads them once before
measuring. `dense` has llama-8b's matrices (16 GB: all of llama-8b). `moe` has ten thousand tensors:
the experts of 26 layers with separate tensors for each expert, as on the Hub. Sides alternate.
Rows:

`<n>gb-<case>/copy_ratio`: `ratio` is the seconds of the copy divided by those of loading, the best
round of each. `pinned_ratio` (CUDA) is relative to a copy from pinned memory, which is faster, but
which a file reader has to fill first. `host_bytes` is the peak growth of the process's memory,
excluding weights in host memory.

`<n>gb-dense/ready`: seconds from constructing an engine until it serves, each start in its own
process (case `ready`; only with vLLM installed). The best of --starts counts, since a first start
also compiles kernels. 16 GB take about a minute for the copies. `ready` takes --starts starts of
Manta and of vLLM, 2 to 3 minutes with compiled kernels. --resume keeps the day's lines of other
cases, so that each case can be run separately.
"""

import argparse
import gc
import importlib.util
import json
import math
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from bench.report.result_file import Line, RawLines, print_ratios, ratio_row, versions
from bench.versus.engine import run_side
from engine.config.model_config import ModelConfig
from engine.models.registry import build_model
from engine.weights import load_weights
from engine.weights.index import CODES
from kernels.dispatch import kernels_for

GB = 10**9
CASES = ("ready", "dense", "moe")
_SHARD = 2 * GB
_SOURCE = 1 << 30  # bytes of host memory that are copied repeatedly


def dense(gb: float) -> dict[str, Any]:
    """Return the configuration of a model of `gb` GB that is like llama-8b.

    Below 6 GB it has narrower layers.
    """
    narrow = 1 if gb >= 6 else 2
    hidden, inner = 4096 // narrow, 14336 // narrow
    layer = 2 * (2 * hidden * hidden + hidden * hidden // 2 + 3 * hidden * inner)
    vocab = 128256 // narrow**2
    ends = 2 * 2 * vocab * hidden
    return _llama(hidden, inner, vocab, max(1, round((gb * GB - ends) / layer)), kv_heads=8)


def moe(gb: float, layers: int = 26) -> dict[str, Any]:
    """Return the configuration of a Qwen3-MoE with 393 tensors per layer.

    384 of the tensors belong to experts, which are narrower than qwen3-30b-a3b's.
    """
    # A layer has about 75 h^2 weights: 3 * 128 * h * (3/16 h) in experts, the rest in attention.
    hidden = max(256, round(math.sqrt(gb * GB / 2 / layers / 75) / 256) * 256)
    heads = hidden // 64
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": max(16, round(hidden * 3 / 16 / 16) * 16),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 32768,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def _llama(hidden: int, inner: int, vocab: int, layers: int, kv_heads: int) -> dict[str, Any]:
    heads = hidden // 128 if hidden >= 2048 else hidden // 64
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": min(kv_heads, heads),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def tensors(folder: Path) -> list[tuple[str, list[int]]]:
    """Return names and shapes of the tensors in a checkpoint for the folder's config.json."""
    meta = build_model(
        ModelConfig.from_folder(folder),
        torch.bfloat16,
        "meta",
        kernels_for("cpu"),
        runs_on="cpu",
    )
    return [
        (source.name, list(source.shape))
        for parameter in meta.parameters()
        for source in parameter.sources
    ]


def make(folder: Path, config: dict[str, Any]) -> list[int]:
    """Write the folder's checkpoint, and return the bytes of each tensor."""
    (folder / "config.json").write_text(json.dumps(config))
    # An engine also needs a tokenizer: make one with a token for each row of the head.
    words = {f"<{id}>": id for id in range(config["vocab_size"])}
    Tokenizer(WordLevel(words, "<0>")).save(str(folder / "tokenizer.json"))
    names = tensors(folder)
    pattern = torch.empty(32 << 20, dtype=torch.bfloat16).normal_(0, 0.02)
    raw = pattern.view(torch.uint8).numpy()
    sizes = [2 * math.prod(shape) for _, shape in names]
    for number, shard in enumerate(_shards(list(zip(names, sizes, strict=True)))):
        header, at = {}, 0
        for (name, shape), size in shard:
            header[name] = {
                "dtype": CODES[torch.bfloat16],
                "shape": shape,
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            while at > 0:
                file.write(memoryview(raw)[: min(at, len(raw))])
                at -= len(raw)
    return sizes


def _shards(entries: list[Any]) -> Iterator[list[Any]]:
    parts: list[Any] = []
    size = 0
    for entry in entries:
        if parts and size + entry[1] > _SHARD:
            yield parts
            parts, size = [], 0
        parts.append(entry)
        size += entry[1]
    yield parts


def load(folder: Path, device: str) -> None:
    config = ModelConfig.from_folder(folder)
    model = build_model(config, torch.bfloat16, device, kernels_for(device))
    load_weights(model, folder)


def copy(source: Tensor, sizes: Sequence[int], device: str) -> list[Tensor]:
    """Copy bytes from `source` to new tensors of these sizes; restart at the source's end."""
    pieces, at = [], 0
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        for begin in range(0, size, len(source)):
            part = tensor[begin : begin + len(source)]
            if at + len(part) > len(source):
                at = 0
            part.copy_(source[at : at + len(part)], non_blocking=True)
            at += len(part)
        pieces.append(tensor)
    return pieces


def timed(device: str, work: Callable[[], Any]) -> float:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    del result
    return took


class _Peak:
    """A recorder of the peak growth of this process's memory."""

    def __enter__(self) -> "_Peak":
        self._stop = threading.Event()
        self._first = self.bytes = _resident()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.bytes = max(self.bytes, _resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes -= self._first


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def against_copy(folder: Path, sizes: list[int], device: str, rounds: int) -> Line:
    """Time loading against copies of as many bytes, alternating; return each round's seconds."""
    total = sum(sizes)
    source = torch.empty(min(_SOURCE, total), dtype=torch.uint8).random_()
    ways: dict[str, Callable[[], Any]] = {
        "load": lambda: load(folder, device),
        "copy": lambda: copy(source, sizes, device),
    }
    if device == "cuda":
        pinned = source[: 256 << 20].pin_memory()
        ways["pinned"] = lambda: copy(pinned, sizes, device)
    timed(device, ways["load"])  # warms up the page cache, kernels and the device's context
    with _Peak() as peak:
        timed(device, ways["load"])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            seconds[name].append(timed(device, work))
    return {
        "bytes": total,
        "tensors": len(sizes),
        "host_bytes": peak.bytes - (total if device == "cpu" else 0),
        "seconds": seconds,
    }


def starts(folder: Path, count: int) -> Iterator[Line]:
    """Yield a line for each start: its side, the seconds until ready, and the configuration."""
    for run in range(count):
        for side in ("manta", "vllm"):
            for line in run_side(side, str(folder), [], [], None, load_format="auto"):
                yield {"run": run, **line}


def rows(lines: list[Line]) -> list[Line]:
    """Compute the table's rows from all lines, including those of earlier calls."""
    rows = [_copy_row(line) for line in lines if "seconds" in line]
    for case in dict.fromkeys(line["case"] for line in lines if "ready_s" in line):
        ours, peer = (
            min(li["ready_s"] for li in lines if li["case"] == case and li.get("side") == side)
            for side in ("manta", "vllm")
        )
        rows.append(ratio_row(case, ours, peer, "s"))
    return rows


def _copy_row(line: Line) -> Line:
    best = {name: min(seconds) for name, seconds in line["seconds"].items()}
    row = {
        "case": line["case"],
        "ours": round(line["bytes"] / GB / best["load"], 2),
        "peer": round(line["bytes"] / GB / best["copy"], 2),
        "unit": "GB/s",
        "ratio": round(best["copy"] / best["load"], 3),
        "bytes": line["bytes"],
        "tensors": line["tensors"],
        "host_bytes": line["host_bytes"],
    }
    if "pinned" in best:
        row["pinned_ratio"] = round(best["pinned"] / best["load"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--gb", type=float, default=16.0, help="bytes of each case's weights")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="of loading and copying, in turns")
    parser.add_argument("--starts", type=int, default=2, help="of each engine, in turns")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    parser.add_argument("--resume", action="store_true", help="keep the day's lines of other cases")
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = list(args.cases)
    if "ready" in cases and not importlib.util.find_spec("vllm"):
        cases.remove("ready")
        print("ready: left out, vLLM is not installed here", flush=True)
    labels = {
        name: f"{args.gb:g}gb-" + ("dense/ready" if name == "ready" else f"{name}/copy_ratio")
        for name in cases
    }

    def others(lines: list[Line]) -> list[Line]:
        return [line for line in lines if line["case"] not in labels.values()]

    raw = RawLines(args.out, "loading", others if args.resume else None)
    for config, names in ((dense(args.gb), ("ready", "dense")), (moe(args.gb), ("moe",))):
        if not labels.keys() & set(names):
            continue
        folder = Path(tempfile.mkdtemp(prefix="manta-loading-", dir=args.folder))
        try:
            sizes = make(folder, config)
            if "ready" in labels and "ready" in names:
                # Time starts before this process has a context on the device, as both engines need
                # the whole device.
                for line in starts(folder, args.starts):
                    raw.keep({"case": labels["ready"], **line})
            if names[-1] in labels:
                line = against_copy(folder, sizes, device, args.rounds)
                raw.keep({"case": labels[names[-1]], **line})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    sides = {line["side"]: line["config"] for line in raw.all if "config" in line}
    settings = {"device": device, "gb": args.gb, "rounds": args.rounds}
    ours = {**settings, "starts": sides.get("manta"), "versions": versions("transformers")}
    results = rows(raw.all)
    raw.finish({"ours": ours, "peers": {"vllm": sides["vllm"]} if "vllm" in sides else {}}, results)
    print_ratios(results)


if __name__ == "__main__":
    main()
