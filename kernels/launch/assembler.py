"""The choice of the assembler (ptxas) by which Triton generates machine code.

ptxas 12.8, which Triton 3.6 uses for Hopper, has a bug. If two operands of wgmma with different
swizzles occupy the same shared memory, one after the other, the descriptors of one operand are
built from uninitialised registers. So tensor cores read from arbitrary addresses. This happens in
launches with one pipeline stage, whose tiles reuse memory: a latent decode with tiles of 128 keys,
or a pass of Gated DeltaNet with one stage.

ptxas 12.9 is correct, and Triton's wheel contains it for Blackwell. On an H200 both launches run
with ptxas 12.9. Five other launches of these layers run with either version, and take the same time
within 1.5 %.
"""

import contextlib
from pathlib import Path

from triton import knobs

RIGHT = (12, 9)


def choose_assembler() -> None:
    """Choose Triton's assembler for this process and the processes it starts.

    TRITON_PTXAS_PATH, if set, takes precedence.
    """
    with contextlib.suppress(RuntimeError):  # without an assembler this process compiles nothing
        own, newer = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
        wheels = Path(own.path).parent == Path(newer.path).parent
        if wheels and _release(own) < RIGHT <= _release(newer):
            knobs.nvidia.ptxas = newer.path


def _release(tool: knobs.NvidiaTool) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
