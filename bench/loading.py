"""How quickly weights are read: from files in the page cache to the device, against a plain copy of
as many bytes from host memory to the device, in turns.

    python -m bench.loading --gb 16 --out bench/results          # on the machine with the GPU
    python -m bench.loading --device cpu --gb 1

It makes its files (random numbers, removed afterwards) in --folder and reads them once before it
measures. Rows: `<n>gb-dense` has matrices as llama-8b has, `10000-tensors` ten thousand of a
hundredth of that. `ratio` is the seconds of the copy by those of loading, the best of the rounds of
each; `pinned_ratio` (CUDA) is that of a copy out of pinned memory, which no reader of files has
for nothing. `host_bytes` is what the process's memory grew by at most, beside the weights where
these are in host memory.
"""

import argparse
import gc
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
from torch import Tensor

from bench.report.result_file import write
from engine.config.model_config import ModelConfig
from engine.models.registry import build_model
from engine.weights import load_weights
from engine.weights.index import CODES
from kernels.dispatch import kernels_for

GB = 10**9
_SHARD = 2 * GB
_SOURCE = 1 << 30  # bytes of host memory that copies are made from, again and again


def dense(gb: float) -> dict[str, Any]:
    """llama-8b's layers, as many as make so many GB; below 6 GB narrower ones."""
    narrow = 1 if gb >= 6 else 2
    hidden, inner = 4096 // narrow, 14336 // narrow
    layer = 2 * (2 * hidden * hidden + hidden * hidden // 2 + 3 * hidden * inner)
    vocab = 128256 // narrow**2
    ends = 2 * 2 * vocab * hidden
    return _llama(hidden, inner, vocab, max(1, round((gb * GB - ends) / layer)), kv_heads=8)


def many(gb: float, tensors: int = 10_000) -> dict[str, Any]:
    """Nine tensors a layer, all in the layers."""
    layers = tensors // 9
    # A layer has 4 h^2 + 3 h * 2.75 h numbers.
    hidden = max(64, round(math.sqrt(gb * GB / layers / 2 / 12.25) / 64) * 64)
    return _llama(hidden, hidden * 11 // 4, 256, layers, kv_heads=hidden // 64)


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
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def make(folder: Path, config: dict[str, Any]) -> tuple[int, list[int]]:
    """Write the folder. Returns its bytes, and those of each tensor."""
    (folder / "config.json").write_text(json.dumps(config))
    meta = build_model(
        ModelConfig.from_folder(folder),
        torch.bfloat16,
        "meta",
        kernels_for("cpu"),
        runs_on="cpu",
    )
    names = [
        (source.name, list(source.shape)) for each in meta.parameters() for source in each.sources
    ]
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
    return sum(sizes), sizes


def _shards(entries: list[Any]) -> Iterator[list[Any]]:
    found: list[Any] = []
    size = 0
    for entry in entries:
        if found and size + entry[1] > _SHARD:
            yield found
            found, size = [], 0
        found.append(entry)
        size += entry[1]
    yield found


def load(folder: Path, device: str) -> None:
    config = ModelConfig.from_folder(folder)
    model = build_model(config, torch.bfloat16, device, kernels_for(device))
    load_weights(model, folder)


def copy(source: Tensor, sizes: Sequence[int], device: str) -> list[Tensor]:
    """So many bytes in tensors of these sizes."""
    found, at = [], 0
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        for begin in range(0, size, len(source)):
            part = tensor[begin : begin + len(source)]
            if at + len(part) > len(source):
                at = 0
            part.copy_(source[at : at + len(part)], non_blocking=True)
            at += len(part)
        found.append(tensor)
    return found


def timed(device: str, work: Callable[[], Any]) -> float:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    began = time.perf_counter()
    kept = work()
    if device == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    del kept
    return took


class _Peak:
    """How much the process's own memory grows at most."""

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


def measure(case: str, config: dict[str, Any], device: str, rounds: int, place: Path) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="manta-loading-", dir=place))
    try:
        total, sizes = make(folder, config)
        source = torch.empty(min(_SOURCE, total), dtype=torch.uint8).random_()
        ways: dict[str, Callable[[], Any]] = {
            "load": lambda: load(folder, device),
            "copy": lambda: copy(source, sizes, device),
        }
        if device == "cuda":
            pinned = source[: 256 << 20].pin_memory()
            ways["pinned"] = lambda: copy(pinned, sizes, device)
        timed(device, ways["load"])  # the page cache, kernels, the device's context
        with _Peak() as peak:
            timed(device, ways["load"])
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, work in ways.items():
                seconds[name].append(timed(device, work))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = {name: min(each) for name, each in seconds.items()}
    row = {
        "case": f"{case}/copy_ratio",
        "ours": round(total / GB / best["load"], 2),
        "peer": round(total / GB / best["copy"], 2),
        "unit": "GB/s",
        "ratio": round(best["copy"] / best["load"], 3),
        "bytes": total,
        "tensors": len(sizes),
        "host_bytes": peak.bytes - (total if device == "cpu" else 0),
    }
    if "pinned" in best:
        row["pinned_ratio"] = round(best["pinned"] / best["load"], 3)
    return row, {"case": case, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--gb", type=float, default=16.0, help="bytes of each case's weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = {f"{args.gb:g}gb-dense": dense(args.gb), "10000-tensors": many(args.gb)}
    rows, lines = [], []
    for case, config in cases.items():
        row, line = measure(case, config, device, args.rounds, args.folder)
        print(json.dumps(row), flush=True)
        rows.append(row)
        lines.append(line)
    if args.out:
        settings = {"device": device, "gb": args.gb, "rounds": args.rounds}
        write(args.out, "loading", {"ours": settings}, rows, lines)


if __name__ == "__main__":
    main()
