"""Scratch memory for generated kernels: one block per Python thread, as a thread's kernels run one
at a time.
"""

import threading

import numpy as np

from kernels.cpu.codegen.compiler import keep


class _Scratch(threading.local):
    # This is not a torch tensor, because torch's allocations come from
    # `kernels.cpu.codegen.program.Buffers` while a step is recorded, and later steps reuse those
    # buffers. Scratch memory must stay valid after the step.
    floats = np.empty(0, np.float32)


_scratch = _Scratch()


def scratch(size: int) -> int:
    """Return the address of scratch memory for `size` float32 numbers, aligned to a cache line.

    The numbers are uninitialised, and the memory is valid until the next call.
    """
    if len(_scratch.floats) < size + 16:
        _scratch.floats = np.empty(size + 16, np.float32)
    keep(_scratch.floats)
    return -(-int(_scratch.floats.ctypes.data) // 64) * 64
