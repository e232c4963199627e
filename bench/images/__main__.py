"""Requests with pictures, by the engine alone: time to first token, and requests/s under load.

    python -m bench.images --model bench/models/qwen3-vl-8b --out bench/results

Weights and pictures are random. `first/...` is the time to the first token of a single request:
with a new picture, then with the same picture after another text (its embeddings are cached), then
with the same prompt again. `load/...` runs --streams concurrent requests, four times as many in
total, each with a different picture. Pictures are decoded and resized before the clock starts,
since routers do that.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from bench.report.result_file import write
from bench.versus.engine import engine_fields
from engine.factory import build
from engine.images.image import Image
from engine.images.processor import ImageProcessor, image_processor, prepare
from engine.library.llm import make_config
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore

BEFORE, BEHIND = 32, 8  # tokens of text around a picture
REPEATS = 5


class Requests:
    """A generator of requests whose prompts are a text, a picture and another text."""

    def __init__(self, processor: ImageProcessor, vocab: int) -> None:
        self._processor, self._vocab = processor, vocab
        self._random = np.random.default_rng(0)
        self._count = 0

    def prompt(self, size: tuple[int, int], image: Image | None = None) -> tuple[list[int], Image]:
        """Return the tokens of a new text with `image`, or with a new picture of this size."""
        layout = self._processor.layout(*size)
        if image is None:
            pixels = self._random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            picture = Pillow.fromarray(pixels)
            image = prepare(self._processor, picture, layout, BEFORE + layout.first)
        text = self._random.integers(1, min(self._vocab, 32_000), BEFORE + BEHIND).tolist()
        return [*text[:BEFORE], *layout.token_ids, *text[BEFORE:]], image

    def request(self, prompt: tuple[list[int], Image], output: int) -> EngineRequest:
        self._count += 1
        ids, image = prompt
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return EngineRequest(self._count, ids, len(ids), params, self._count, images=[image])


def first_token(core: EngineCore, request: EngineRequest) -> float:
    """Return the milliseconds to the request's first token."""
    begin = time.perf_counter()
    core.add_request(request)
    while not any(delta.token_ids for delta in core.step()):
        pass
    seconds = time.perf_counter() - begin
    while core.has_work():
        core.step()
    return 1000 * seconds


def firsts(core: EngineCore, requests: Requests, size: tuple[int, int]) -> dict[str, float]:
    """Return the median milliseconds to the first token of a single request, by case."""
    times: dict[str, list[float]] = {"new_ms": [], "same_picture_ms": [], "same_prompt_ms": []}
    for _ in range(REPEATS):
        prompt = requests.prompt(size)
        other = requests.prompt(size, prompt[1])
        for name, either in zip(times, (prompt, other, prompt), strict=True):
            times[name].append(first_token(core, requests.request(either, 2)))
    return {name: round(float(np.median(values)), 1) for name, values in times.items()}


def load(core: EngineCore, waiting: Iterator[EngineRequest], streams: int) -> dict[str, float]:
    """Run all requests, `streams` at a time; return requests/s and output tokens/s."""
    begin = time.perf_counter()
    for _, request in zip(range(streams), waiting, strict=False):
        core.add_request(request)
    done = tokens = 0
    while core.has_work():
        for delta in core.step():
            tokens += len(delta.token_ids)
            if delta.finish:
                done += 1
                if (following := next(waiting, None)) is not None:
                    core.add_request(following)
    seconds = time.perf_counter() - begin
    return {"requests_s": round(done / seconds, 2), "tok_s": round(tokens / seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="folder with its two configurations")
    parser.add_argument("--sizes", nargs="+", default=["640x427", "1920x1080"], metavar="WxH")
    parser.add_argument("--load", default="640x427", metavar="WxH", help="pictures of the load")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    values: dict[str, Any] = {"load_format": "dummy", "max_model_len": 16_384}
    values |= {"max_num_seqs": args.streams} | engine_fields(args.set)
    processor = image_processor(Path(args.model))
    if processor is None:
        parser.error(f"{args.model} takes no pictures here")
    core, ready = build(make_config(args.model, values))
    requests = Requests(processor, core.config.vocab_size)
    lines: list[dict[str, Any]] = []

    def measured(case: str, line: dict[str, float]) -> None:
        lines.append({"case": case, **line})
        print(json.dumps(lines[-1]), flush=True)

    for named in args.sizes:
        width, height = map(int, named.split("x"))
        measured(f"first/{named}", firsts(core, requests, (width, height)))
    width, height = map(int, args.load.split("x"))
    for _ in range(2):  # the second run counts; the first compiles missing kernels
        waiting = [
            requests.request(requests.prompt((width, height)), args.output)
            for _ in range(4 * args.streams)
        ]
        measured(f"load/{args.load}", load(core, iter(waiting), args.streams))
    if args.out:
        config = {"ours": {**values, "memory": ready.memory_table.splitlines()}}
        write(args.out, "images", config, lines, lines)


if __name__ == "__main__":
    main()
