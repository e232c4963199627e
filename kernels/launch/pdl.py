"""Programmatic dependent launch: a kernel starts while the one before it ends, then waits.

On Hopper and later, a kernel launched with `**pdl(device)` may become resident before its
predecessor on the stream has finished. What makes it safe: before gdc_wait() it writes nothing, and
reads nothing that its predecessor writes; every program of it waits, so that it does not end before
its predecessor; and gdc_launch_dependents() comes after gdc_wait(), so that no more than two
kernels overlap.
"""

from functools import lru_cache
from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "num_sms", "pdl", "shared_memory"]


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; a small stand-in where kernels are interpreted on the CPU."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have at most; those of Hopper where there is no device."""
    if device.type != "cuda":
        return 227 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@lru_cache
def pdl(device: torch.device) -> dict[str, Any]:
    """Launch options: the kernel's constexpr PDL, and the attribute where the device has it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
