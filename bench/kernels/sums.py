"""All-reduces over the GPUs of one machine, by size: `kernels.all_reduce` against NCCL.

    python -m bench.kernels.sums --ranks 2

It prints a JSON line for each size: microseconds of an all-reduce by one-shot, two-shot and NCCL,
and of the all-reduce with residual and norm, fused and separate. The last line has the sizes at
which the fastest algorithm changes, for `engine.parallel.peer_group.CROSSINGS`.

--sweep: measure numbers of programs and tile sizes of an all-reduce, for messages of up to 16 MB,
alone and with the norm. It prints a line for each setting, a table, and the best settings for
`kernels.all_reduce` and CROSSINGS.

--one-gpu: all ranks are processes on the first GPU, where they alternate, and NCCL is left out.
This is for testing the measurement; the times are meaningless.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from bench.kernels.measure import time_us
from bench.report.result_file import versions
from engine.parallel import rendezvous
from engine.parallel.group import DistributedGroup
from engine.parallel.peer_group import PeerGroup
from kernels import all_reduce
from kernels.norm import rms_norm

COLUMNS = 8192  # elements per row, as in a model with 70 billion parameters
SIZES = tuple(1 << power for power in range(13, 25))  # bytes: 8 kB to 16 MB
CALLS = 20  # calls in a graph
OURS = ("one_shot", "two_shot", "apart", "with_norm")
LIBRARY = ("nccl", "nccl_apart")

# Swept settings of `kernels.all_reduce`; the first is the one that the engine uses.
SETTINGS = tuple((programs, tile) for programs in (64, 128) for tile in (1 << 14, 1 << 15))
SWEPT = tuple(1 << power for power in (13, 16, 18, 20, 21, 22, 23, 24))  # bytes
HIDDEN = (4096, 8192, 2048)
TOKENS = (1, 64, 128, 256, 512, 1024, 2048, 8192)
SMALL = 256 << 10  # maximum bytes of the all-reduces that determine a single stream's latency

Line = dict[str, Any]
Setting = tuple[int, int]  # programs, tile


def measure(
    group: PeerGroup,
    device: torch.device,
    rows: int,
    columns: int,
    ways: Collection[str],
    repeats: int = 20,
) -> Line:
    """Measure the microseconds of one size by each algorithm in `ways`; all ranks must call it."""
    x = torch.ones(rows, columns, device=device).bfloat16() / 64
    residual, weight, memory = torch.zeros_like(x), x[0].clone(), group.memory

    def apart(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: rms_norm(add(x, residual), weight, 1e-5)

    calls: dict[str, Callable[[], object]] = {
        "nccl": lambda: DistributedGroup.all_reduce(group, x),
        "nccl_apart": apart(lambda x, onto: DistributedGroup.add_reduced(group, x, onto)),
    }
    if x.nbytes <= all_reduce.LARGEST:
        calls["one_shot"] = lambda: memory.one_shot(x)
        calls["two_shot"] = lambda: memory.two_shot(x)
        calls["apart"] = apart(memory.one_shot)
    if memory.norm_fits(x):
        calls["with_norm"] = lambda: memory.norm_one_shot(x, residual, weight, 1e-5)
    line: Line = {}
    for name, call in calls.items():
        if name in ways:
            group.least(0)
            line[name] = round(time_us([call] * CALLS, repeats), 2)
    return line


def crossings(lines: list[Line]) -> tuple[int, int]:
    """Return two sizes in bytes, at which the fastest algorithm changes.

    For all measured sizes up to the first, one-shot is fastest. Up to the second, one-shot or
    two-shot is at least as fast as NCCL.
    """
    none = float("inf")
    times = [
        (line["bytes"], *(line.get(way, none) for way in ("one_shot", "two_shot", "nccl")))
        for line in lines
        if "one_shot" in line
    ]
    least = takewhile(lambda of: min(of[1], of[2]) <= of[3], times)
    first = takewhile(lambda of: of[1] <= min(of[2], of[3]), times)
    few, most = (max((size for size, *_ in limits), default=0) for limits in (first, least))
    return few, most


def sweep(group: PeerGroup, device: torch.device, say: Callable[[Line], None]) -> None:
    """Measure each setting by size, and with the norm by rows of each width; print the best."""
    region, _ = group.memory.holder
    bare = [(size // 2 // min(COLUMNS, size // 2), min(COLUMNS, size // 2)) for size in SWEPT]
    normed = [(tokens, hidden) for hidden in HIDDEN for tokens in TOKENS]
    library = {
        (shape, with_norm): measure(group, device, *shape, [name])[name]
        for shapes, with_norm, name in ((bare, False, "nccl"), (normed, True, "nccl_apart"))
        for shape in shapes
    }
    lines: dict[Setting, list[Line]] = {}
    for programs, all_reduce.TILE in SETTINGS:
        # All ranks reset the shared memory while no rank uses it.
        torch.cuda.synchronize(device)
        group.least(0)
        region.zero_()
        torch.cuda.synchronize(device)
        group.least(0)
        laid_out = replace(group, memory=replace(group.memory, programs=programs))
        place = {"programs": programs, "tile": all_reduce.TILE}
        measured = lines[programs, all_reduce.TILE] = []
        for shapes, with_norm, ways in (
            (bare, False, ["one_shot"]),
            (normed, True, ["apart", "with_norm"]),
        ):
            for shape in shapes:
                times = measure(laid_out, device, *shape, ways)
                times["nccl"] = library[shape, with_norm]
                size = {"rows": shape[0], "columns": shape[1], "norm": with_norm}
                measured.append({**place, **size, **times})
                say(measured[-1])
    if not group.rank:
        print_sweep(lines)
    say({"set": what_to_set(lines), "versions": versions()})


def over_the_first(lines: dict[Setting, list[Line]], setting: Setting) -> tuple[float, float]:
    """Return a setting's times relative to the first setting: (small all-reduces, others).

    Both are geometric means.
    """

    def mean(small: bool) -> float:
        ratios = [
            ours(a) / ours(b)
            for a, b in zip(lines[setting], lines[SETTINGS[0]], strict=True)
            if (a["rows"] * a["columns"] * 2 <= SMALL) == small
        ]
        return prod(ratios) ** (1 / len(ratios))

    return mean(True), mean(False)


def ours(line: Line) -> float:
    return float(min(line[way] for way in OURS if way in line))


def best_of(lines: dict[Setting, list[Line]]) -> Setting:
    """Return the best setting.

    A setting replaces the first if it is 2 % faster, and at most 2 % slower for small all-reduces.
    """
    better = {}
    for programs in lines:
        small, others = over_the_first(lines, programs)
        if small <= 1.02 and others <= 0.98:
            better[others] = programs
    return better[min(better)] if better else SETTINGS[0]


def what_to_set(lines: dict[Setting, list[Line]]) -> Line:
    """Return the values for CROSSINGS and `kernels.all_reduce`."""
    best = best_of(lines)
    _, most = crossings(
        [{"bytes": line["rows"] * line["columns"] * 2, **line} for line in lines[best]]
    )
    return {
        "PROGRAMS": best[0],
        "TILE": best[1],
        "CROSSINGS[2]": [most, most],
        "LARGEST": max(most, 8 << 20),
    }


def print_sweep(lines: dict[Setting, list[Line]]) -> None:
    print(f"{'programs':>8} {'tile':>6} {'small':>6} {'others':>6}  over the first")
    for setting in sorted(lines, key=lambda each: over_the_first(lines, each)[1]):
        small, others = over_the_first(lines, setting)
        print(f"{setting[0]:8} {setting[1]:6} {small:6.3f} {others:6.3f}")
    names = ("one_shot", "apart", "with_norm", "nccl")
    print(f"{'rows':>6} {'columns':>7}", *(f"{name:>9}" for name in names), f"{'as fast':>12}")
    for line, first in zip(lines[best_of(lines)], lines[SETTINGS[0]], strict=True):
        times = (f"{line[name]:9.2f}" if name in line else f"{'':9}" for name in names)
        place = f"{line['rows']:6} {line['columns']:7}"
        print(place, *times, f"{ours(first) / ours(line):12.3f}", flush=True)


def rank(number: int, size: int, port: int, one_gpu: bool, swept: bool) -> None:
    device = torch.device("cuda", 0 if one_gpu else number)
    torch.cuda.set_device(device)
    if one_gpu:
        rendezvous.BACKEND = "gloo"
    if swept:  # allocate enough memory for all settings
        all_reduce.PROGRAMS = max(programs for programs, _ in SETTINGS)
        all_reduce.LARGEST = SWEPT[-1]
    store = TCPStore("127.0.0.1", port, is_master=not number, wait_for_workers=False)
    nothing = rendezvous.Activations(1, 1, 1, torch.bfloat16)
    group = rendezvous.distributed(number, size, 1, device, store, nothing, exact=False).group
    if not isinstance(group, PeerGroup):
        raise SystemExit("these GPUs do not see each other's memory; see the log")

    def say(line: Line) -> None:
        if not number:
            print(json.dumps(line), flush=True)

    with torch.inference_mode():
        if swept:
            sweep(group, device, say)
        else:
            lines = []
            for shape in SIZES[: 3 if one_gpu else None]:
                columns = min(COLUMNS, shape // 2)
                rows, ways = shape // 2 // columns, OURS + (() if one_gpu else LIBRARY)
                measured = measure(group, device, rows, columns, ways, 1 if one_gpu else 20)
                lines.append({"bytes": shape, **measured})
                say(lines[-1])
            say({"crossings": {size: crossings(lines)}, "versions": versions()})
    group.check()
    group.least(0)
    sys.stdout.flush()
    os._exit(0)  # Exit without NCCL's shutdown, which waits for other ranks.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="what to set, for two ranks")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--rank", type=int, nargs=2, metavar=("NUMBER", "PORT"), help="be one")
    args = parser.parse_args()
    if args.rank:
        rank(args.rank[0], args.ranks, args.rank[1], args.one_gpu, args.sweep)
    if not args.one_gpu and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks}: this machine has {torch.cuda.device_count()} GPUs")
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    port = str(_free_port())
    command = [sys.executable, "-m", "bench.kernels.sums", "--ranks", str(args.ranks)]
    command += ["--one-gpu"] * args.one_gpu + ["--sweep"] * args.sweep
    ranks = [
        subprocess.Popen([*command, "--rank", str(number), port], env=environment)
        for number in range(args.ranks)
    ]
    try:
        status = [process.wait() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    sys.exit(max(map(abs, status)))


def _free_port() -> int:
    """Return a free port, by binding a TCPStore to it for a moment."""
    return int(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


if __name__ == "__main__":
    main()
