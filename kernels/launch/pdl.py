"""Programmatic dependent launch: a kernel starts before its predecessor on the stream has ended.

On Hopper and later, a kernel launched with `**pdl(device)` may become resident before its
predecessor on the stream has finished. Three rules keep this safe. Before gdc_wait() a kernel
writes nothing, and reads nothing that its predecessor writes. All its programs call gdc_wait(), so
that it does not end before its predecessor. And gdc_launch_dependents() comes after gdc_wait(), so
that no more than two kernels overlap.
"""

from functools import lru_cache
from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch.device import HOPPER, compute_capability

__all__ = ["gdc_launch_dependents", "gdc_wait", "num_sms", "pdl"]


@lru_cache
def num_sms(device: torch.device) -> int:
    """Return a device's number of multiprocessors; for the CPU's interpreter a small number."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def pdl(device: torch.device) -> dict[str, Any]:
    """Return launch options for programmatic dependent launch, if the device supports it.

    The options are the kernel's constexpr PDL, and Triton's launch attribute.
    """
    if device.type != "cuda" or compute_capability(device) < HOPPER:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
