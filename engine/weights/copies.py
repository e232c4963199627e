"""Copies of tensors in memory to parameters, launched together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.weights.stream import EXPONENTS, Job, allocate


def copy_jobs(jobs: Sequence[Job], device: torch.device) -> None:
    """Run jobs whose stored tensors are in memory, on the caller's stream.

    Values are not checked for NaN and infinity. Jobs end as in `run_jobs`. The copies of all jobs
    whose memory is already allocated are launched together.
    """
    copies = Copies()
    for job in jobs:
        if job.allocate is None:
            _add_copies(job, copies)
    copies.run()
    for job in jobs:
        if job.allocate is not None:
            allocate(job)
            _add_copies(job, copies)
            copies.run()
        if device.type != "cuda" or job.allocate is not None:
            job.end()


def _add_copies(job: Job, copies: "Copies") -> None:
    with torch.inference_mode():
        for part in job.transfers:
            offset, length = part.byte_range
            raw = part.stored.held_bytes[offset : offset + length]
            copies.add(part.target, part.to_values(raw))
    job.transfers = []


class Copies:
    """A list of copies between tensors of equal shapes, launched together.

    Only copies of 16- and 32-bit floats are collected. Other dtypes are copied at once, as not all
    of them have a kernel for lists of tensors.
    """

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add a copy, which is launched now or by `run`."""
        if target.dtype is source.dtype and target.dtype in EXPONENTS:
            self._targets.append(target)
            self._sources.append(source)
        else:
            target.copy_(source)

    def run(self) -> None:
        """Launch the remaining copies and forget them."""
        if self._targets:
            with torch.inference_mode():
                torch._foreach_copy_(self._targets, self._sources)
        self._targets, self._sources = [], []
