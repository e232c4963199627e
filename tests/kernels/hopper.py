"""A driver that stands for a Hopper GPU where there is none: Triton compiles for it."""

from typing import Any

from triton.backends.compiler import GPUTarget


class Hopper:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "none"  # a key of Triton's caches; none of a real device's

    def get_current_stream(self, device: Any) -> int:
        return 0
