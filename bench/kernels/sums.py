"""Sums over the GPUs of one machine: those of `kernels.peer_sums` against NCCL's, by size, in CUDA
graphs.

    python -m bench.kernels.sums --ranks 2

Prints a JSON line for each size: microseconds of a sum by one shot, by two shots and by NCCL; and
of the sum, the residual and the norm behind it, in one kernel and apart. The last line has where
the ways cross, as `engine.parallel.peers.CROSSINGS` keeps it.

--one-gpu: all ranks are processes on the first GPU. They take turns there, and NCCL refuses them:
it shows that the measurement works, and its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from bench.kernels.measure import time_us
from bench.report.result_file import versions
from engine.parallel import opening
from engine.parallel.group import DistributedGroup
from engine.parallel.peers import PeerGroup
from kernels.norm import rms_norm

COLUMNS = 8192  # elements of a row, so many as a model of 70 billion parameters has
SIZES = tuple(1 << power for power in range(13, 25))  # bytes: 8 kB to 16 MB
CALLS = 20  # in a graph

Line = dict[str, Any]


def measure(
    group: PeerGroup, device: torch.device, rows_bytes: int, library: bool, repeats: int = 20
) -> Line:
    """Of one size; every rank takes part."""
    columns = min(COLUMNS, rows_bytes // 2)
    x = torch.ones(rows_bytes // 2 // columns, columns, device=device).bfloat16() / 64
    residual, weight, memory = torch.zeros_like(x), x[0].clone(), group.memory
    found: Line = {"bytes": rows_bytes}

    def timed(name: str, call: Callable[[], object]) -> None:
        group.least(0)
        found[name] = round(time_us([call] * CALLS, repeats), 2)

    def apart(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: rms_norm(add(x, residual), weight, 1e-5)

    if rows_bytes <= max(group.crossings):
        timed("one_shot", lambda: memory.one_shot(x))
        timed("two_shot", lambda: memory.two_shot(x))
        timed("apart", apart(memory.one_shot))
        if memory.norm_fits(x):
            timed("with_norm", lambda: memory.norm_one_shot(x, residual, weight, 1e-5))
    if library:
        timed("nccl", lambda: DistributedGroup.all_reduce(group, x))
        timed("nccl_apart", apart(lambda x, onto: DistributedGroup.add_reduced(group, x, onto)))
    return found


def crossings(lines: list[Line]) -> tuple[int, int]:
    """Bytes up to which one shot is fastest from the smallest size on, and up to which one of both
    ways through memory is."""
    none = float("inf")
    times = [
        (line["bytes"], *(line.get(way, none) for way in ("one_shot", "two_shot", "nccl")))
        for line in lines
        if "one_shot" in line
    ]
    least = takewhile(lambda of: min(of[1], of[2]) <= of[3], times)
    first = takewhile(lambda of: of[1] <= min(of[2], of[3]), times)
    few, most = (max((size for size, *_ in each), default=0) for each in (first, least))
    return few, most


def rank(number: int, size: int, port: int, one_gpu: bool) -> None:
    device = torch.device("cuda", 0 if one_gpu else number)
    torch.cuda.set_device(device)
    if one_gpu:
        opening.BACKEND = "gloo"
    store = TCPStore("127.0.0.1", port, is_master=not number, wait_for_workers=False)
    nothing = opening.Activations(1, 1, 1, torch.bfloat16)
    group = opening.distributed(number, size, 1, device, store, nothing, exact=False).group
    if not isinstance(group, PeerGroup):
        raise SystemExit("these GPUs do not see each other's memory; see the log")
    lines = []
    with torch.inference_mode():
        for size_of in SIZES[: 3 if one_gpu else None]:
            repeats = 1 if one_gpu else 20
            lines.append(measure(group, device, size_of, not one_gpu, repeats))
            if not number:
                print(json.dumps(lines[-1]), flush=True)
    group.check()
    if not number:
        found = {"crossings": {size: crossings(lines)}, "versions": versions()}
        print(json.dumps(found), flush=True)
    group.least(0)
    sys.stdout.flush()
    os._exit(0)  # without the end of NCCL, which waits for others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--rank", type=int, nargs=2, metavar=("NUMBER", "PORT"), help="be one")
    args = parser.parse_args()
    if args.rank:
        rank(args.rank[0], args.ranks, args.rank[1], args.one_gpu)
    if not args.one_gpu and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks}: this machine has {torch.cuda.device_count()} GPUs")
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    port = str(_free_port())
    command = [sys.executable, "-m", "bench.kernels.sums", "--ranks", str(args.ranks)]
    command += ["--one-gpu"] * args.one_gpu
    ranks = [
        subprocess.Popen([*command, "--rank", str(number), port], env=environment)
        for number in range(args.ranks)
    ]
    try:
        status = [each.wait() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    sys.exit(max(map(abs, status)))


def _free_port() -> int:
    """The store of rank 0 lets go of it at once."""
    return int(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


if __name__ == "__main__":
    main()
