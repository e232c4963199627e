"""The gated GEMM of an MLP on Hopper: act(x @ gate.T) * (x @ up.T) in one kernel.

The kernel is in CUDA C++ (gated.cu). Compared with cuBLASLt's fastest algorithm and an activation
kernel it saves writing and reading the GEMM's result. Its tile of 128 x 224 (TILE 112), which
neither has a size that is a power of two nor is one of cuBLASLt's, fills an H200's 132
multiprocessors evenly where a model has 14,336 outputs. A cluster of two multiprocessors reads a
weight once for 256 rows.

Microseconds on one H200, size 14,336, depth 4,096, weights not in the L2 cache:

    rows    here   cuBLASLt, tuned, and the activation
     224    82.5    89.2
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

_BOX, _DEPTH = 32, 64  # gated.cu: BOX and DEPTH
_SHARED = 227 * 1024 - 1024 - 256  # bytes of shared memory for stages: alignment, barriers
_BAND = 8  # blocks of rows that share a tile of weights, so that the L2 cache has both


class Form(NamedTuple):
    """A form of the kernel.

    groups: computing warpgroups of a block, of 64 rows each.
    split_rows: whether the two blocks of a cluster have different rows; else different outputs.
    registers: registers of a computing thread; producer_registers: of one of the producer's.
    """

    groups: int
    split_rows: bool
    registers: int
    producer_registers: int

    @property
    def rows(self) -> int:
        """The rows of a cluster's tile."""
        return 64 * self.groups * (1 + self.split_rows)


_LEAST_USED = 0.93  # share of computed outputs that must be wanted; below, cuBLASLt is faster
_LEAST_BYTES = 32 << 20  # of a weight; a smaller one is read before a cluster has begun
NARROW = Form(2, False, 232, 40)  # for one block of rows
WIDE = Form(2, True, 232, 40)
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


def _definitions(form: Form, tile: int, stages: int, gate: str, dtype: torch.dtype) -> str:
    """Return what gated.cu expects to be defined before it."""
    name = _NAMES[dtype]
    low, high = _TO_FLOAT[dtype]
    places = ", ".join(f"%{i}" for i in range(tile))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(tile))
    return f"""
#define TILE {tile}
#define STAGES {stages}
#define BAND {_BAND}
#define GROUPS {form.groups}
#define SPLIT_ROWS {int(form.split_rows)}
#define REGISTERS {form.registers}
#define PRODUCER_REGISTERS {form.producer_registers}
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

    tile: outputs of a block's tile. clusters: clusters of two blocks that run at once.
    row_blocks, column_blocks: numbers of clusters' tiles.
    """

    form: Form
    tile: int
    clusters: int
    row_blocks: int
    column_blocks: int


def plan_of(form: Form, rows: int, size: int, clusters: int) -> Plan:
    """Return the plan of a form, with the tile of outputs that takes the least time.

    clusters: clusters of two blocks that can run at once.
    """
    width = 1 if form.split_rows else 2  # tiles of outputs in a cluster's tile

    # A tile takes about as long as it has outputs, and a little longer for its rows of x.
    def cost(tile: int) -> int:
        return cdiv(cdiv(size, width * tile), clusters) * (tile + 4)

    tile = min(reversed(_TILES), key=cost)
    return Plan(form, tile, clusters, cdiv(rows, form.rows), cdiv(size, width * tile))


@cache
def _fastest(rows: int, size: int, clusters: int) -> Plan | None:
    """Return the fastest form's plan, or None if cuBLASLt and an activation are faster."""
    if rows <= 64:
        return None  # reading the weights takes all of the time
    form = NARROW if rows <= NARROW.rows else WIDE
    plan = plan_of(form, rows, size, clusters)
    waves = cdiv(plan.row_blocks * plan.column_blocks, clusters)
    computed = waves * clusters * form.rows * plan.tile
    if form.split_rows and rows * size < _LEAST_USED * computed:
        return None
    return plan


def _make(plan: Plan, gate: str, dtype: torch.dtype, device: torch.device) -> CudaKernel:
    form, tile = plan.form, plan.tile
    stage_bytes = (64 * form.groups + 2 * tile) * _DEPTH * 2
    stages = _SHARED // stage_bytes
    source = _definitions(form, tile, stages, gate, dtype)
    source += Path(__file__).with_suffix(".cu").read_text()
    threads, shared_bytes = 128 * (form.groups + 1), 1024 + stages * stage_bytes
    return CudaKernel(source, "sm_90a", "gated_gemm", device, threads, shared_bytes)


class _Kernels:
    """The kernels of one size, activation and dtype on a device, compiled when they are first
    needed.

    Both forms are compiled at once, as a start may launch one of them only.
    """

    def __init__(self, size: int, gate: str, dtype: torch.dtype, device: torch.device) -> None:
        clusters = num_sms(device) // 2
        plans = (plan_of(form, 1, size, clusters) for form in (NARROW, WIDE))
        self.by_form = {plan.form: _make(plan, gate, dtype, device) for plan in plans}
        self._loaded: bool | None = None

    def usable(self) -> bool:
        """Whether the kernels can be launched; while kernels are collected this is assumed.

        A warning is logged if they cannot.
        """
        if self._loaded is None and Compilers.is_collecting:
            return True
        if self._loaded is None:
            try:
                for kernel in self.by_form.values():
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
    kernel = _kernels(size, gate, x.dtype, x.device).by_form[plan.form]
    y = x.new_empty(rows, size)
    kernel(
        2 * min(plan.clusters, plan.row_blocks * plan.column_blocks),
        tensor_map(x, (_BOX, _DEPTH)),
        tensor_map(weight, (plan.tile, _DEPTH)),
        y,
        integers(rows, size, cdiv(depth, _DEPTH), plan.row_blocks, plan.column_blocks),
    )
    return y
