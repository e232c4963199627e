"""Requests with pictures, and with text only, on one GPU: Manta's engine against vLLM's, offline.

    python -m bench.versus.images --model FOLDER --name qwen3-vl-8b --turns 2

FOLDER has config.json, the files of the tokenizer and of the image processor; weights are random on
all sides. Engines get Pillow images, so that their resizing is included. Each picture is new and
random, as in vLLM's `random-mm`. Each side has its own process, started once. vLLM has its default
settings, except those that must equal Manta's. The best turn counts.

- `first` is the time to the only token of a single request with a large picture, `again` the time
  of the same prompt with the same picture: medians in milliseconds; ratios below 1 are better.
- `load` and `mixed` are requests/s with `--streams` requests at a time. In `load` each request has
  a picture, in `mixed` every second one.
- `text` is tokens/s of prompts without pictures. Its peer is Manta with only the language model.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as Pillow

from bench.report.result_file import Line, print_ratios, versions
from bench.versus.harness import Harness, Piece, lines_of
from bench.versus.vllm_weights import NOTE, WORKER, check_drawn

TEXT = "manta-text"  # the side Manta with only the language model
SIDES = ("manta", "vllm", TEXT)
LARGE, SMALL = (1920, 1080), (640, 427)
MAX_MODEL_LEN = 16_384
MEMORY_FRACTION = 0.85
REPEATS = 5
WORDS = 4  # four-digit numbers before a picture, and as many after it
TEXT_WORDS = 64  # numbers in a text prompt: about as many tokens as a prompt with a small picture


class Prompt(NamedTuple):
    """A text with the model's placeholder, and its picture."""

    text: str
    picture: Pillow.Image | None


# (prompts, requested tokens of each answer) -> the number of tokens of each answer
Generate = Callable[[list[Prompt], int], list[int]]


class Prompts:
    """A generator of prompts that are all different.

    placeholder: the text of a picture.
    """

    def __init__(self, placeholder: str) -> None:
        self._placeholder = placeholder
        self._random = np.random.default_rng(0)

    def _words(self, count: int) -> str:
        return " ".join(f"{number:04}" for number in self._random.integers(0, 10_000, count))

    def seeing(self, size: tuple[int, int]) -> Prompt:
        """Return a prompt with a picture of this width and height."""
        pixels = self._random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        text = f"{self._words(WORDS)} {self._placeholder} {self._words(WORDS)}"
        return Prompt(text, Pillow.fromarray(pixels))

    def plain(self) -> Prompt:
        return Prompt(self._words(TEXT_WORDS), None)


def run_manta(model: str, streams: int) -> tuple[Generate, dict[str, Any]]:
    """Start Manta's engine; return a function that generates, and the configuration."""
    from engine import LLM, SamplingParams

    config: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": streams,
        "memory_fraction": MEMORY_FRACTION,
    }
    llm = LLM(model, **config)

    def generate(prompts: list[Prompt], tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
        requests: list[Any] = [
            text if picture is None else {"prompt": text, "images": [picture]}
            for text, picture in prompts
        ]
        outputs = llm.generate(requests, params, detokenize=False, progress=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, {**config, "versions": versions("transformers")}


def run_vllm(model: str, streams: int) -> tuple[Generate, dict[str, Any]]:
    """Start vLLM's engine; return a function that generates, and the configuration."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    config: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": streams,
        "gpu_memory_utilization": MEMORY_FRACTION,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "worker_cls": WORKER,
    }
    llm = LLM(model=model, disable_log_stats=True, **config)
    check_drawn(llm)

    def generate(prompts: list[Prompt], tokens: int) -> list[int]:
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False
        )
        requests = [
            {"prompt": text}
            if picture is None
            else {"prompt": text, "multi_modal_data": {"image": picture}}
            for text, picture in prompts
        ]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, {**config, "weights": NOTE, "versions": versions("vllm", "transformers")}


def text_folder(model: Path, folder: Path) -> Path:
    """Write the language model of a Qwen3-VL folder as a separate model folder; return its path."""
    text = json.loads((model / "config.json").read_text())["text_config"]
    text.pop("rope_scaling", None)
    text |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(text))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def run_side(side: str, model: Path, args: argparse.Namespace) -> None:
    """Start a side, run its workloads, and print a JSON line for each; the first turn is a warm-up.

    Raises SystemExit if an answer is too short.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if side == TEXT:
            model = text_folder(model, Path(folder))
        start = run_vllm if side == "vllm" else run_manta
        generate, config = start(str(model), args.streams)
    ready_s = round(time.perf_counter() - began, 2)
    print(json.dumps({"side": side, "ready_s": ready_s, "config": config}), flush=True)

    def timed(prompts: list[Prompt], tokens: int) -> float:
        begin = time.perf_counter()
        counts = generate(prompts, tokens)
        if counts != [tokens] * len(prompts):
            raise SystemExit(f"{side}: answers of {sorted(set(counts))} tokens, not {tokens}")
        return time.perf_counter() - begin

    source = Prompts(args.placeholder)
    count = 4 * args.streams
    for turn in range(-1, args.turns):
        results: dict[str, float] = {}
        if side != TEXT:
            large = [source.seeing(LARGE) for _ in range(REPEATS)]
            pairs = [(timed([prompt], 1), timed([prompt], 1)) for prompt in large]
            for name, times in zip(("first", "again"), zip(*pairs, strict=True), strict=True):
                results[name] = 1000 * median(times)
            seeing = [source.seeing(SMALL) for _ in range(count)]
            results["load"] = count / timed(seeing, args.tokens)
            half = [source.plain() if at % 2 else source.seeing(SMALL) for at in range(count)]
            results["mixed"] = count / timed(half, args.tokens)
        if side != "vllm":
            plain = [source.plain() for _ in range(count)]
            results["text"] = count * args.tokens / timed(plain, args.tokens)
        for name, result in results.items() if turn >= 0 else ():
            line = {"side": side, "workload": name, "turn": turn, "result": round(result, 2)}
            print(json.dumps(line), flush=True)


UNITS = {"first": "ms", "again": "ms", "load": "req/s", "mixed": "req/s", "text": "tok/s"}


def rows_of(label: str, lines: Sequence[Line]) -> list[Line]:
    """Compute a row for each workload that two sides ran."""
    rows: list[Line] = []
    for name, unit in UNITS.items():
        results: dict[str, list[float]] = {}
        for line in lines:
            if line.get("workload") == name:
                results.setdefault(line["side"], []).append(line["result"])
        best = {side: (min if unit == "ms" else max)(many) for side, many in results.items()}
        ours, *others = (best[side] for side in SIDES if side in best)
        row: Line = {"case": f"{label}/{name}", "ours": ours, "unit": unit}
        rows += [row | {"peer": peer, "ratio": round(ours / peer, 3)} for peer in others]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="folder of a Qwen3-VL")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--placeholder", default="<|vision_start|><|image_pad|><|vision_end|>")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--side", choices=SIDES, help="run one side only, here")
    args = parser.parse_args()
    model = args.model.resolve()
    if args.side:
        run_side(args.side, model, args)
        return
    harness = Harness(args.out, "versus-images", ("side",))

    def run_piece(piece: Piece) -> Iterator[Line]:
        command = [sys.executable, "-m", "bench.versus.images", "--side", piece[0]]
        command += ["--model", str(model), "--placeholder", args.placeholder]
        for name in ("streams", "tokens", "turns"):
            command += [f"--{name}", str(getattr(args, name))]
        return lines_of(command)

    configs = harness.run_sides(args.sides, run_piece)
    raw = harness.raw
    rows = rows_of(args.name, raw.all)
    peers = {side: config for side, config in configs.items() if side != "manta"}
    raw.finish({"ours": configs["manta"], "peers": peers}, rows)
    print_ratios(rows)


if __name__ == "__main__":
    main()
