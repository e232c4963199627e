"""copy_device_rows: copies of equally spaced rows between addresses that one GPU reads and writes.

One launch copies all blocks. For copies within a device, `kernels.block_copies` would take 6 us of
host time per block, and an H200's copy engine reaches only 420 GB/s.
"""

import contextlib

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

_VECTOR_BYTES = 16  # of the widest load


def copy_device_rows(
    addresses: npt.NDArray[np.int64],
    target_pitch: int,
    source_pitch: int,
    width: int,
    height: int,
    stream: torch.cuda.Stream | None,
) -> None:
    """Enqueue copies between addresses that the current device reads and writes.

    addresses: int64 [copies, 2], (target, source) of each copy's first row. They, the pitches and
        the width are multiples of 4 bytes.
    stream: None for the CPU, which interprets the kernel.

    The other parameters are those of `kernels.block_copies.copy_rows`.
    """
    together = int(np.bitwise_or.reduce(addresses, None)) | target_pitch | source_pitch | width
    aligned = not together % _VECTOR_BYTES
    word = 8 if aligned else 4
    table = torch.from_numpy(np.ascontiguousarray(addresses))
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        if stream is not None:
            table = table.pin_memory().to(stream.device, non_blocking=True)
        _copy_rows_kernel[len(addresses), height](
            table,
            target_pitch // word,
            source_pitch // word,
            width // word,
            ALIGNED=aligned,
            WORDS=1024,
            num_warps=4,
        )


@triton.jit
def _copy_rows_kernel(
    addresses,
    target_pitch,
    source_pitch,
    width,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy row `program_id(1)` of copy `program_id(0)`.

    addresses: int64 [copies, 2], (target, source) of each first row.
    target_pitch, source_pitch, width: in words of eight bytes if all are aligned, else of four.
    """
    copy, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    words = tl.pointer_type(tl.int64 if ALIGNED else tl.int32)
    target = tl.load(addresses + 2 * copy).to(words) + row * target_pitch
    source = tl.load(addresses + 2 * copy + 1).to(words) + row * source_pitch
    if ALIGNED:
        target, source = tl.multiple_of(target, 16), tl.multiple_of(source, 16)
    for at in range(0, width, WORDS):
        offsets = at + tl.arange(0, WORDS)
        exists = offsets < width
        tl.store(target + offsets, tl.load(source + offsets, exists), exists)
