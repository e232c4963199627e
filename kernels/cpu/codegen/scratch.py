"""Memory that a generated kernel uses while it runs, one a Python thread: kernels run in turns."""

import threading

import numpy as np

from kernels.cpu.codegen.compiler import keep


class _Scratch(threading.local):
    # Not torch's: while a step is recorded torch's allocations come from buffers that later steps
    # use again (`kernels.cpu.codegen.program.Buffers`), and this memory outlasts the step.
    floats = np.empty(0, np.float32)


_scratch = _Scratch()


def scratch(size: int) -> int:
    """Return the address of `size` or more float32 numbers of scratch, which start a cache line.

    The numbers have no meaning, and the memory is valid until the next call.
    """
    if len(_scratch.floats) < size + 16:
        _scratch.floats = np.empty(size + 16, np.float32)
    keep(_scratch.floats)
    return -(-int(_scratch.floats.ctypes.data) // 64) * 64
