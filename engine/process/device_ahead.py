"""prepare_device: opens the GPU while the engine imports torch.

The creation of a CUDA context takes most of a second and does not hold Python's lock, so it is done
on a thread beside imports that take seconds. The thread itself imports nothing: two threads that
import a package and its modules may wait for each other.
"""

import ctypes
from threading import Thread

from engine.config.engine_config import EngineConfig


def prepare_device(config: EngineConfig, rank: int) -> None:
    """Start the thread that opens a rank's GPU; do nothing for an engine on the CPU.

    The device's number is that of `engine.resolve`. Whatever fails here fails again at its first
    use, and is reported there.
    """
    if config.device != "cpu":
        number = rank % config.ranks_per_node
        Thread(target=open_context, args=(number,), name="device-ahead", daemon=True).start()


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
