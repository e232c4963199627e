"""The properties of a CUDA device on which kernels and their launch parameters depend.

`act_as` makes a process behave as on an older device. Kernels are then compiled without features of
newer devices (TMA, wgmma, dependent launches, matmuls of 8-bit floats), and use no more shared
memory than the older device has.
"""

from functools import lru_cache

import torch

Capability = tuple[int, int]  # compute capability of CUDA

KIB = 1024
# Compute capability -> maximum bytes of shared memory per program.
SHARED_MEMORY: dict[Capability, int] = {
    (7, 5): 64 * KIB,
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}
LEAST: Capability = (7, 5)  # the oldest capability that the pinned Triton's assembler supports
HOPPER: Capability = (9, 0)
_acting: list[Capability] = []  # the capability that `act_as` has set, if any


def act_as(capability: Capability) -> None:
    """Make this process compile and choose kernels as on a device of this compute capability.

    It must be called before the first kernel. Triton generates PTX for `capability`; ptxas then
    generates machine code for the actual device.
    """
    from triton import knobs

    # Triton also writes this knob to the environment.
    knobs.runtime.override_arch = f"sm{capability[0]}{capability[1]}"
    _acting[:] = [capability]
    forget()


def forget() -> None:
    """Clear the cached properties of devices."""
    compute_capability.cache_clear()
    shared_memory.cache_clear()


@lru_cache
def compute_capability(device: torch.device) -> Capability:
    """Return the compute capability to compile for: the device's, that of `act_as`, or Hopper's.

    Hopper's is for machines without a device.
    """
    if _acting:
        return _acting[0]
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the maximum bytes of shared memory per program; Hopper's without a device."""
    if device.type != "cuda" or _acting:
        return SHARED_MEMORY[compute_capability(device)]
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def stages_within(room: int, stages: int, stage_bytes: int) -> int:
    """Return the number of pipeline stages, at most `stages`, whose tiles fit into shared memory.

    A pipeline of n stages holds the tiles of n - 1 stages in shared memory.

    room: free bytes of shared memory. stage_bytes: bytes of a stage's tiles.
    """
    return max(1, min(stages, 1 + room // stage_bytes))
