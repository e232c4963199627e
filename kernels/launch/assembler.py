"""Which assembler Triton makes machine code with.

ptxas 12.8, which Triton 3.6 has for Hopper, gets one thing wrong. Where two operands of wgmma with
different swizzles lie at one place in shared memory, one after the other, the descriptors of one
are made from registers that nothing has written: what the last kernel left there says where the
matrix unit reads. So launches of one stage, whose tiles take each other's places, read illegal
addresses or not, by what ran before: a decode over latents in tiles of 128 keys, a pass of Gated
DeltaNet in one stage. ptxas 12.9 makes them right, and the wheel brings it, for Blackwell:
on an H200 both launches run with it, and five calls of these layers that run with either take the
same time within 1.5 %.
"""

import contextlib
from pathlib import Path

from triton import knobs

RIGHT = (12, 9)


def choose_assembler() -> None:
    """Choose Triton's assembler for this process and the processes it starts.

    An assembler that TRITON_PTXAS_PATH names is kept.
    """
    with contextlib.suppress(RuntimeError):  # there is none: nothing is compiled here
        own, newer = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
        wheels = Path(own.path).parent == Path(newer.path).parent
        if wheels and _release(own) < RIGHT <= _release(newer):
            knobs.nvidia.ptxas = newer.path


def _release(tool: knobs.NvidiaTool) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
