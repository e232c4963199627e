"""The gated GEMM of an MLP on Hopper: act(x @ gate.T) * (x @ up.T) in one kernel.

The kernel is in CUDA C++ (gated.cu). A GEMM and an activation kernel write the GEMM's result and
read it again. The kernel has tiles that fill the multiprocessors evenly, also those that Triton
cannot have (powers of two) or cuBLASLt has not: 112 of llama-8b's 14,336 outputs for each of an
H200's 128 blocks. Two blocks, a cluster, share what both read.

Microseconds on one H200, 14,336 outputs, 4,096 inputs, weights not in the L2 cache:

    rows    here   cuBLASLt, tuned, and the activation
      96    62.9    65.8
     128    63.6    69.2
     256    82.9    90.9
     512   157.1   164.5
    1,024  308.4   317.1
"""

import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from kernels.launch.compiling import Compilers
from kernels.launch.device import HOPPER, compute_capability
from kernels.launch.nvrtc import CudaError, CudaKernel, integers, tensor_map
from kernels.launch.pdl import num_sms

logger = logging.getLogger("manta.kernels")

# gated.cu: rows of a block, threads of a block, BOX and DEPTH
_ROWS, _THREADS, _BOX, _DEPTH = 128, 384, 32, 64
_SHARED = 227 * 1024 - 1024 - 256  # bytes of shared memory for stages: alignment, barriers
_BAND = 8  # blocks of rows that share a tile of weights, so that the L2 cache has both


_LEAST_USED = 0.93  # share of computed outputs that must be wanted; below, cuBLASLt is faster
_LEAST_BYTES = 32 << 20  # of a weight; a smaller one is read before a cluster has begun
_TILES = tuple(range(16, 129, 8))  # outputs of a block's tile

# Activation -> logit_of(x): it is x times the logistic function of this.
_LOGITS = {
    "silu": "x",
    "gelu_pytorch_tanh": "1.5957691216057308f * (x + 0.044715f * x * x * x)",
}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_TO_FLOAT = {
    torch.bfloat16: ("__uint_as_float(pair << 16)", "__uint_as_float(pair & 0xFFFF0000)"),
    torch.float16: ("from_half(pair)", "from_half(pair >> 16)"),
}


def _stage_bytes(tile: int) -> int:
    return (_ROWS + 2 * tile) * _DEPTH * 2


def _stages(tile: int) -> int:
    """Return the number of stages that fit into shared memory."""
    return _SHARED // _stage_bytes(tile)


def _definitions(split_rows: bool, tile: int, gate: str, dtype: torch.dtype) -> str:
    """Return what gated.cu expects to be defined before it."""
    name = _NAMES[dtype]
    low, high = _TO_FLOAT[dtype]
    places = ", ".join(f"%{i}" for i in range(tile))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(tile))
    return f"""
#define TILE {tile}
#define STAGES {_stages(tile)}
#define BAND {_BAND}
#define SPLIT_ROWS {int(split_rows)}
__device__ inline float from_half(unsigned bits) {{
    float value;
    asm("{{.reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half;}}"
        : "=f"(value) : "r"(bits));
    return value;
}}
__device__ inline float low_of(unsigned pair) {{ return {low}; }}
__device__ inline float high_of(unsigned pair) {{ return {high}; }}
__device__ inline float logit_of(float x) {{ return {_LOGITS[gate]}; }}
__device__ inline unsigned rounded(float low, float high) {{
    unsigned pair;
    asm("cvt.rn.{name}x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}}
__device__ inline void multiply_add(
    float (&sums)[{tile}], unsigned long long a, unsigned long long b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{tile + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{2 * tile}k16.f32.{name}.{name} "
        "{{{places}}}, %{tile}, %{tile + 1}, add, 1, 1, 0, 0;\\n}}"
        : {sums} : "l"(a), "l"(b), "r"(add));
}}
"""


class Plan(NamedTuple):
    """How a product is computed.

    split_rows: whether the two blocks of a cluster have different rows; else different outputs.
    tile: outputs of a block's tile. clusters: clusters of two blocks that run at once.
    row_blocks, column_blocks: numbers of clusters' tiles.
    """

    split_rows: bool
    tile: int
    clusters: int
    row_blocks: int
    column_blocks: int


def plan_of(split_rows: bool, rows: int, size: int, clusters: int) -> Plan:
    """Return the plan with the tile of outputs that takes the least time.

    split_rows: must be True for more than 128 rows.
    clusters: clusters of two blocks that can run at once.
    """
    height, width = (2, 1) if split_rows else (1, 2)  # blocks of a cluster

    # A tile takes about as long as it has outputs, and a little longer for its rows of x.
    def cost(tile: int) -> int:
        return cdiv(cdiv(size, width * tile), clusters) * (tile + 4)

    tile = min(reversed(_TILES), key=cost)
    return Plan(split_rows, tile, clusters, cdiv(rows, height * _ROWS), cdiv(size, width * tile))


@cache
def _fastest(rows: int, size: int, clusters: int) -> Plan | None:
    """Return the fastest form's plan, or None if cuBLASLt and an activation are faster."""
    if rows <= 64:
        return None  # reading the weights takes all of the time
    plan = plan_of(rows > _ROWS, rows, size, clusters)
    waves = cdiv(plan.row_blocks * plan.column_blocks, clusters)
    computed = waves * clusters * 2 * _ROWS * plan.tile
    if plan.split_rows and rows * size < _LEAST_USED * computed:
        return None
    return plan


def _make(plan: Plan, gate: str, dtype: torch.dtype, device: torch.device) -> CudaKernel:
    source = _definitions(plan.split_rows, plan.tile, gate, dtype)
    source += Path(__file__).with_suffix(".cu").read_text()
    shared_bytes = 1024 + _stages(plan.tile) * _stage_bytes(plan.tile)
    return CudaKernel(source, "sm_90a", "gated_gemm", device, _THREADS, shared_bytes)


class _Kernels:
    """The kernels of one size, activation and dtype on a device, compiled when they are first
    needed: for at most 128 rows, and for more.

    Both are compiled at once, as a start may launch one of them only.
    """

    def __init__(self, size: int, gate: str, dtype: torch.dtype, device: torch.device) -> None:
        clusters = num_sms(device) // 2
        plans = [plan_of(split_rows, 1, size, clusters) for split_rows in (False, True)]
        self.pair = [_make(plan, gate, dtype, device) for plan in plans]
        self._loaded: bool | None = None

    def usable(self) -> bool:
        """Whether the kernels can be launched; while kernels are collected this is assumed.

        A warning is logged if they cannot.
        """
        if self._loaded is None and Compilers.is_collecting:
            return True
        if self._loaded is None:
            try:
                for kernel in self.pair:
                    kernel.load()
                self._loaded = True
            except (OSError, AttributeError, CudaError) as error:
                logger.warning("gated GEMMs are a GEMM and an activation: %s", error)
                self._loaded = False
        return self._loaded


_kernels = cache(_Kernels)


def gated_plan(x: Tensor, weight: Tensor, gate: str) -> Plan | None:
    """Return the plan of `gated`, or None if a GEMM and an activation are faster one by one.

    x: [rows, depth]. weight: [2 * size, depth]. gate: a key of `Kernels.GATES`.
    """
    rows, depth = x.shape
    size = weight.shape[0] // 2
    if gate not in _LOGITS or not x.is_cuda or x.dtype not in _NAMES or weight.dtype != x.dtype:
        return None
    if size % 8 or depth % 8 or weight.nbytes < _LEAST_BYTES:
        return None
    if compute_capability(x.device) != HOPPER:
        return None
    plan = _fastest(rows, size, num_sms(x.device) // 2)
    if plan is None or not _kernels(size, gate, x.dtype, x.device).usable():
        return None
    return plan


def gated(x: Tensor, weight: Tensor, gate: str, plan: Plan) -> Tensor:
    """Return act(x @ gate.T) * (x @ up.T), [rows, size]; weight has the rows of gate, then of up.

    Both products are rounded to x's dtype before the activation, as GEMMs of their own would round
    them. x, weight: contiguous. plan: `gated_plan` of a tensor of x's shape and dtype.
    """
    rows, depth = x.shape
    size = weight.shape[0] // 2
    assert x.is_contiguous() and weight.is_contiguous()
    kernel = _kernels(size, gate, x.dtype, x.device).pair[plan.split_rows]
    y = x.new_empty(rows, size)
    kernel(
        2 * min(plan.clusters, plan.row_blocks * plan.column_blocks),
        tensor_map(x, (_BOX, _DEPTH)),
        tensor_map(weight, (plan.tile, _DEPTH)),
        y,
        integers(rows, size, cdiv(depth, _DEPTH), plan.row_blocks, plan.column_blocks),
    )
    return y
