"""The properties of a CUDA device on which kernels and their launch parameters depend.

`act_as` makes a process behave as on an older device: kernels are compiled without the features of
newer devices (TMA, wgmma, dependent launches, matmuls of 8-bit floats), and within the older
device's shared memory.
"""

from functools import lru_cache

import torch

Capability = tuple[int, int]  # compute capability of CUDA

KIB = 1024
# The largest shared memory of a program in bytes, by compute capability.
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
LEAST: Capability = (7, 5)  # the oldest that the pinned Triton's assembler supports
HOPPER: Capability = (9, 0)
_acting: list[Capability] = []  # the capability that `act_as` has set, if any


def act_as(capability: Capability) -> None:
    """Make this process compile and choose kernels as on a device of this compute capability.

    To be called before the first kernel. Triton generates PTX for `capability`; only the step from
    PTX to machine code is for the actual device.
    """
    from triton import knobs

    knobs.runtime.override_arch = f"sm{capability[0]}{capability[1]}"  # in the environment too
    _acting[:] = [capability]
    forget()


def forget() -> None:
    """Clear the cached properties of devices."""
    compute_capability.cache_clear()
    shared_memory.cache_clear()


@lru_cache
def compute_capability(device: torch.device) -> Capability:
    """Return the compute capability whose kernels a device runs; Hopper's without a device."""
    if _acting:
        return _acting[0]
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the largest shared memory of a program in bytes; Hopper's without a device."""
    if device.type != "cuda" or _acting:
        return SHARED_MEMORY[compute_capability(device)]
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def stages_within(room: int, stages: int, stage_bytes: int) -> int:
    """Return the number of pipeline stages, at most `stages`, whose tiles fit into shared memory.

    n stages keep n - 1 tiles in shared memory.

    room: free bytes of shared memory. stage_bytes: bytes of a stage's tiles.
    """
    return max(1, min(stages, 1 + room // stage_bytes))
