r"""Rates of copies of KV blocks between a GPU and pinned host memory, by the pool's layout.

    python -m bench.kv.copies --out bench/results

It needs a CUDA device, 6 GiB of its memory, 2 GiB of pinned host memory and about 30 s. A block of
llama-8b in bfloat16 is 64 rows of 32 KiB, which are far apart in a pool [layers, 2, blocks, ...]:

 rows          one cuMemcpy2DAsync per block, as the host tier does
rows-near     the same without gaps between rows, to show the cost of the gaps
 batch         one cuMemcpyBatchAsync of all rows of all blocks
 gather        an index kernel into a buffer on the device, then one copy of 2 MiB per block
 blocks        one copy of 2 MiB per block, from a pool [blocks, layers, 2, ...]

Each method is measured to the host, to the device, and in both directions at once. `submit_us` is
the host's time per block. `matmul` compares the time of matmuls alone and during copies. JSON lines
are printed, and with --out also written to a file.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.block_copies import call, copy_rows

ROWS, WIDTH = 64, 32 << 10  # llama-8b: 32 layers of keys and values, 16 tokens of 8 heads of 128
POOL, COUNT = 2048, 512  # number of blocks on the device, number of copied blocks
REPEATS = 5

Copy = Callable[[bool, int], None]  # (to the host, stream)


class _Attributes(ctypes.Structure):
    """The driver's struct CUmemcpyAttributes. order: when sources are read in stream order."""

    _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


class Pools:
    """A pool of each layout on the device, and the blocks to copy, in random order."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        self.rows = torch.randint(0, 255, (ROWS, POOL, WIDTH), dtype=torch.uint8, device=device)
        self.blocks = self.rows.new_empty(COUNT, ROWS, WIDTH)
        self.buffer = torch.empty_like(self.blocks)
        self.host = torch.empty(COUNT, ROWS, WIDTH, dtype=torch.uint8, pin_memory=True)
        order = torch.randperm(POOL, generator=torch.Generator().manual_seed(0))[:COUNT]
        self.order = order.to(device)
        self.listed = order.tolist()
        self.slots = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1)).tolist()

    def by_rows(self, to_host: bool, stream: int) -> None:
        pool, host, pitch = self.rows.data_ptr(), self.host.data_ptr(), POOL * WIDTH
        for block, slot in zip(self.listed, self.slots, strict=True):
            place, other = pool + block * WIDTH, host + slot * ROWS * WIDTH
            if to_host:
                copy_rows([(other, place)], WIDTH, pitch, WIDTH, ROWS, stream)
            else:
                copy_rows([(place, other)], pitch, WIDTH, WIDTH, ROWS, stream)

    def without_gaps(self, to_host: bool, stream: int) -> None:
        pool, host = self.blocks.data_ptr(), self.host.data_ptr()
        for slot in self.slots:
            ends = host + slot * ROWS * WIDTH, pool + slot * ROWS * WIDTH
            target, source = ends if to_host else ends[::-1]
            copy_rows([(target, source)], WIDTH, WIDTH, WIDTH, ROWS, stream)

    def by_batch(self, to_host: bool, stream: int) -> None:
        pool, host = self.rows.data_ptr(), self.host.data_ptr()
        near: list[int] = []
        far: list[int] = []
        for block, slot in zip(self.listed, self.slots, strict=True):
            first, other = pool + block * WIDTH, host + slot * ROWS * WIDTH
            near += range(first, first + ROWS * POOL * WIDTH, POOL * WIDTH)
            far += range(other, other + ROWS * WIDTH, WIDTH)
        targets, sources = (far, near) if to_host else (near, far)
        count = len(near)
        places = ctypes.c_uint64 * count
        sizes = (ctypes.c_size_t * count)(*[WIDTH] * count)
        attributes, first_of = _Attributes(order=1 if to_host else 3), ctypes.c_size_t(0)
        call(
            "cuMemcpyBatchAsync",
            places(*targets),
            places(*sources),
            sizes,
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first_of),
            ctypes.c_size_t(1),
            ctypes.byref(ctypes.c_size_t()),
            ctypes.c_void_p(stream),
        )

    def by_gather(self, to_host: bool, stream: int) -> None:
        del stream  # torch copies on its current stream
        if to_host:
            torch.index_select(self.rows.transpose(0, 1), 0, self.order, out=self.buffer)
        for at, slot in enumerate(self.slots):
            if to_host:
                self.host[slot].copy_(self.buffer[at], non_blocking=True)
            else:
                self.buffer[at].copy_(self.host[slot], non_blocking=True)
        if not to_host:
            self.rows.index_copy_(1, self.order, self.buffer.transpose(0, 1))

    def by_blocks(self, to_host: bool, stream: int) -> None:
        del stream
        for at, slot in enumerate(self.slots):
            if to_host:
                self.host[slot].copy_(self.blocks[at], non_blocking=True)
            else:
                self.blocks[at].copy_(self.host[slot], non_blocking=True)


def measure(copy: Copy, *directions: bool) -> dict[str, float]:
    """Return GB/s over all directions at once, and the host's microseconds for each block."""
    streams = [torch.cuda.Stream(priority=0) for _ in directions]
    best, submit = 1e9, 1e9
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for stream, to_host in zip(streams, directions, strict=True):
            with torch.cuda.stream(stream):
                copy(to_host, stream.cuda_stream)
        submitted = time.perf_counter()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
        submit = min(submit, submitted - began)
    moved = COUNT * ROWS * WIDTH * len(directions)
    return {
        "gb_per_s": round(moved / best / 1e9, 2),
        "submit_us": round(1e6 * submit / COUNT / len(directions), 2),
    }


def exact(pools: Pools, copy: Copy) -> bool:
    """Whether a copy to the host and back leaves the blocks unchanged."""
    if copy.__name__ in ("by_blocks", "without_gaps"):
        return True  # this layout is not checked, as it differs from the pool's
    wanted = pools.rows[:, pools.order].clone()
    for to_host in (True, False):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            copy(to_host, stream.cuda_stream)
        torch.cuda.synchronize()
        if to_host:
            pools.rows[:, pools.order] = 0
    return torch.equal(pools.rows[:, pools.order], wanted)


def beside_products(copy: Copy | None) -> float:
    """Return the milliseconds of 40 matmuls, during copies to the host if `copy` is not None."""
    left = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if copy is not None:
            with torch.cuda.stream(low):
                copy(True, low.cuda_stream)
        with torch.cuda.stream(high):
            first.record()
            for _ in range(40):
                product: Tensor = left @ right
            last.record()
        torch.cuda.synchronize()
        del product
        times.append(first.elapsed_time(last))
    return round(min(times), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args()
    pools = Pools()
    ways: dict[str, Copy] = {
        "rows": pools.by_rows,
        "rows-near": pools.without_gaps,
        "batch": pools.by_batch,
        "gather": pools.by_gather,
        "blocks": pools.by_blocks,
    }
    lines: list[dict[str, object]] = [
        {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    ]
    directions = {"to_host": (True,), "to_device": (False,), "both": (True, False)}
    alone = beside_products(None)
    for name, copy in ways.items():
        try:
            lines.append({"way": name, "exact": exact(pools, copy)})
            for direction, chosen in directions.items():
                lines.append({"way": name, "direction": direction, **measure(copy, *chosen)})
            beside = beside_products(copy)
            lines.append({"way": name, "matmul_ms_alone": alone, "matmul_ms_beside": beside})
        except (RuntimeError, AttributeError) as error:  # cuMemcpyBatchAsync needs CUDA 12.8
            lines.append({"way": name, "error": str(error)})
    for line in lines:
        print(json.dumps(line), flush=True)
    if args.out is not None:
        path = args.out / f"kv-copies-{time.strftime('%Y-%m-%d')}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
