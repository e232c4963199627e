"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it reads.

On Hopper and later, a kernel launched with `**pdl(device)` may become resident before its predecessor on the stream has
finished. The rule that makes it safe: nothing that the last two launches wrote is read, and nothing at all is written,
before gdc_wait(); and gdc_launch_dependents() comes after gdc_wait(), so that no more than two kernels overlap.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "num_sms", "pdl", "prefetch_l2"]


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; a small stand-in where kernels are interpreted on the CPU."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def pdl(device: torch.device) -> dict[str, Any]:
    """Launch options: the kernel's constexpr PDL, and the launch attribute where the device has it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def prefetch_l2(address, BYTES: tl.constexpr):
    """Ask for BYTES contiguous bytes (a multiple of 16) at each address to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
