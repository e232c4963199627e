"""The CPU time of a picture in a router: base64, header, decoding, resizing and hashing of a JPEG.

    python -m bench.images.intake --model bench/models/qwen3-vl-8b --out bench/results

`stage/...` has the CPU time of one picture by stage, the minimum of --repeats. `resize_alone_ms` is
the CPU time of Pillow's own resize, and `..._wall_ms` the wall-clock time. `processes/N` runs N
routers' intakes at once, each over --count pictures: CPU time per picture (without the start of the
processes) and pictures/s of all. The picture is generated from seed 0; its file is as large as that
of a photograph.
"""

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from bench.report.result_file import write
from deployments.images.intake import ImageIntake, ImageSource, PlacedPicture
from engine.images.data_url import decode_data_url
from engine.images.picture_file import PictureFile
from engine.images.processor import ImageProcessor, image_processor, prepare

MAX_BYTES = 2**26
AT_ONCE = 4  # concurrent requests of a router


def photograph(width: int, height: int) -> bytes:
    """Return a JPEG with details of all sizes, at about 0.4 bytes per pixel like a photograph."""
    random = np.random.default_rng(0)
    pixels = np.full((height, width, 3), 128.0)
    for side in (2, 8, 32, 128, 512):
        noise = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
        layer = Pillow.fromarray(noise).resize((width, height), Pillow.Resampling.BICUBIC)
        pixels += (np.asarray(layer) - 128.0) / 2.5
    pixels += random.normal(0, 3, pixels.shape)  # a sensor's noise
    file = io.BytesIO()
    Pillow.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    data = file.getvalue()
    return data + bytes(-len(data) % 3)  # a multiple of 3, so that base64 can be appended


def least_ms(work: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Run some work `repeats` times; return its minimum time in milliseconds, by this clock."""
    times = []
    for _ in range(repeats):
        begin = clock()
        work()
        times.append(clock() - begin)
    return round(1000 * min(times), 2)


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """Run some work `repeats` times; return its minimum CPU time over all threads, in ms."""
    return least_ms(work, repeats, time.process_time)


def stages(url: str, processor: ImageProcessor, repeats: int) -> dict[str, float]:
    """Return the CPU milliseconds of a picture by stage, and their sum."""
    data = decode_data_url(url, MAX_BYTES)
    file = PictureFile.read(data)
    picture = file.decode()
    layout = processor.layout(file.width, file.height)
    times = {
        "base64_ms": cpu_ms(lambda: decode_data_url(url, MAX_BYTES), repeats),
        "header_ms": cpu_ms(lambda: PictureFile.read(data), repeats),
        "decode_ms": cpu_ms(file.decode, repeats),
        "resize_ms": cpu_ms(lambda: processor.pixels(picture, layout), repeats),
    }
    prepared = cpu_ms(lambda: prepare(processor, file, layout, 0), repeats)
    times["hash_ms"] = round(prepared - times["resize_ms"] - times["decode_ms"], 2)
    times["all_ms"] = round(sum(times.values()), 2)
    _, height, width = layout.shape

    def alone() -> bytes:
        return picture.resize((width, height), Pillow.Resampling.BICUBIC).tobytes()

    def resize() -> object:
        return processor.pixels(picture, layout)

    for name, work in (("resize_alone", alone), ("resize", resize)):
        times[f"{name}_wall_ms"] = least_ms(work, repeats, time.perf_counter)
    return {**times, "resize_alone_ms": cpu_ms(alone, repeats)}


async def take(url: str, processor: ImageProcessor, count: int) -> None:
    """Read `count` pictures by a router's intake, first headers, then pixels, AT_ONCE at a time.

    Each picture has different bytes appended, because an intake decodes equal files only once.
    """
    intake = ImageIntake()
    waiting = iter(range(count))

    async def stream() -> None:
        for number in waiting:
            held = intake.memory.take(0)
            source = ImageSource("picture", url + base64.b64encode(number.to_bytes(3)).decode())
            (file,) = await intake.read([source], held)
            layout = processor.layout(file.width, file.height)
            await intake.pixels([PlacedPicture([source], [file], layout, 0)], processor, held)

    await asyncio.gather(*(stream() for _ in range(AT_ONCE)))


def router(model: str, size: tuple[int, int], count: int, begin: Any, times: Any) -> None:
    """Run one router's intake; put its wall and CPU seconds into `times`, a queue.

    begin: the barrier at which all routers start.
    """
    url, processor = picture(model, size)
    asyncio.run(take(url, processor, AT_ONCE))
    begin.wait()
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(take(url, processor, count))
    times.put((time.perf_counter() - wall, time.process_time() - cpu))


def picture(model: str, size: tuple[int, int]) -> tuple[str, ImageProcessor]:
    """Return the picture's data: URL and the model's processor."""
    processor = image_processor(Path(model))
    if processor is None:
        raise SystemExit(f"{model} takes no pictures here")
    return "data:image/jpeg;base64," + base64.b64encode(photograph(*size)).decode(), processor


def together(model: str, size: tuple[int, int], count: int, processes: int) -> dict[str, float]:
    """Run several routers' intakes, each over `count` pictures; return CPU ms and pictures/s."""
    context = multiprocessing.get_context("spawn")
    begin, times = context.Barrier(processes), context.Queue()
    routers = [
        context.Process(target=router, args=(model, size, count, begin, times))
        for _ in range(processes)
    ]
    for process in routers:
        process.start()
    measured = [times.get(timeout=600) for _ in routers]
    for process in routers:
        process.join()
    cpu = sum(seconds for _, seconds in measured)
    pictures_s = sum(count / wall for wall, _ in measured)
    return {
        "cpu_ms": round(1000 * cpu / (count * processes), 2),
        "pictures_s": round(pictures_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="bench/models/qwen3-vl-8b", help="folder of a model")
    parser.add_argument("--size", default="1920x1080", metavar="WxH")
    parser.add_argument("--repeats", type=int, default=20, help="of each stage")
    parser.add_argument("--count", type=int, default=100, help="pictures of each process")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, os.cpu_count() or 1])
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    url, processor = picture(args.model, (width, height))
    lines: list[dict[str, Any]] = []
    ImageIntake()  # configures Pillow's memory as in a router

    def measured(case: str, line: dict[str, float]) -> None:
        lines.append({"case": case, **line})
        print(json.dumps(lines[-1]), flush=True)

    measured(f"stage/{args.size}", stages(url, processor, args.repeats))
    for processes in dict.fromkeys(args.processes):
        line = together(args.model, (width, height), args.count, processes)
        measured(f"processes/{processes}", line)
    if args.out:
        config = {"model": args.model, "file_bytes": len(url) * 3 // 4, "count": args.count}
        write(args.out, "image-intake", {"ours": config}, lines, lines)


if __name__ == "__main__":
    main()
