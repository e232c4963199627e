"""Memory that a generated kernel uses while it runs, one a Python thread: kernels run in turns."""

import threading

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import keep


class _Scratch(threading.local):
    floats = torch.empty(0)


_scratch = _Scratch()


def scratch(size: int) -> Tensor:
    """At least `size` float32 numbers of no meaning, until the next call."""
    if _scratch.floats.numel() < size:
        _scratch.floats = torch.empty(size)
    keep(_scratch.floats)
    return _scratch.floats
