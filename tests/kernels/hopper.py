"""Fake Triton drivers of GPUs, with which Triton compiles kernels on machines without a GPU."""

from typing import Any

from triton.backends.compiler import GPUTarget


class Hopper:
    """A fake Triton driver of a Hopper GPU, with the methods that compiling calls."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "none"  # a key of Triton's caches that no real device has

    def get_current_stream(self, device: Any) -> int:
        return 0


class Older(Hopper):
    """A fake driver of a GPU with another compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._arch = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> str:
        return f"none of {self._arch}"
