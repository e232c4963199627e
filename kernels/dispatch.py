"""The table of back ends (subclasses of Kernels) by device.

Layers hold the Kernels they were built with; the back end is not chosen again at run time.
"""

from functools import cache
from importlib import import_module

from kernels.reference import Kernels

__all__ = ["Kernels", "kernels_for"]

# (device type, deterministic) -> module and class of the back end. The module is imported
# when it is needed, because only CUDA's back ends need Triton.
_BACK_ENDS = {
    ("cpu", False): ("kernels.cpu.native", "Native"),
    ("cpu", True): ("kernels.cpu.deterministic", "Deterministic"),
    ("cuda", False): ("kernels.cuda", "Cuda"),
    ("cuda", True): ("kernels.cuda_deterministic", "CudaDeterministic"),
}


@cache
def kernels_for(device: str, deterministic: bool = False) -> Kernels:
    """Return the back end of a device type ("cpu" or "cuda"). Raises KeyError for others."""
    module, name = _BACK_ENDS[device, deterministic]
    back_end: Kernels = getattr(import_module(module), name)()
    return back_end
