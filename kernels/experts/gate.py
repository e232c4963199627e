"""The activation of MoE experts in Triton kernels: act(gate) * up, or act(up) without gates."""

import triton
import triton.language as tl

from kernels.activation import CODES, _act
from kernels.experts.routing import CLAMPED

_CLAMPED = 16


@triton.jit
def gated(gate, up, limit, ACT: tl.constexpr):
    """Return act(gate) * up of float32 tensors of the same shape.

    ACT: an activation's number from `code`. 16: gpt-oss's clamped SwiGLU. 4: experts without gates,
        for which `gate` is the up projection and `up` is not read.
    """
    if ACT == 4:
        y = _act(gate, ACT)
    elif ACT == 16:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    else:
        y = _act(gate, ACT) * up
    return y


def code(act: str) -> int:
    return _CLAMPED if act == CLAMPED else CODES[act]
