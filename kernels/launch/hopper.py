"""Helpers of Gluon kernels for Hopper: layouts, and operations renamed between Triton versions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Copies to shared memory: a box of a tensor by the TMA, and rows by threads.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or (
    gl.shared_memory_descriptor._reinterpret
)

# Layout of tiles of 16-bit numbers whose rows are stored in 128-byte pieces, as wgmma reads them.
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
PIECE = 64  # elements of a 128-byte piece


@gluon.jit
def clear_rows_from(tile, count, ROWS: gl.constexpr):
    """Write zeros to a tile's rows from `count` on; four warps share the work.

    Uninitialised rows may have NaN, and a softmax weight of zero times NaN would be NaN.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    values = tile.load(LAYOUT)
    tile.store(gl.where((row < count)[:, None], values, gl.zeros_like(values)))
