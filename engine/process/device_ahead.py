"""prepare_device: opens the GPU and hashes Triton's compiler while the engine imports torch.

The creation of a CUDA context takes most of a second, and so does the hash. Neither holds Python's
lock, so both are done on a thread beside imports that take seconds.
"""

import ctypes
from importlib import import_module
from threading import Thread

from engine.config.engine_config import EngineConfig
from kernels.launch.compiling import hash_compiler


def prepare_device(config: EngineConfig, rank: int) -> None:
    """Start the thread that prepares a rank's GPU; do nothing for an engine on the CPU.

    The device's number is that of `engine.resolve`. Whatever fails here fails again at its first
    use, and is reported there.
    """
    if config.device != "cpu":
        number = rank % config.ranks_per_node
        Thread(target=_prepare, args=(number,), name="device-ahead", daemon=True).start()


def _prepare(number: int) -> None:
    if not open_context(number):
        return
    import_module("torch")  # waits until the main thread has imported torch
    hash_compiler()


def open_context(number: int) -> bool:
    """Create the primary context of a GPU, which torch then uses. Return whether there is one.

    number: the GPU's number among those that the process sees.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # These functions return 0 for success.
    return not (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), number)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )
