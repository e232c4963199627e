"""collapse: moves this process's large, resident memory to 2 MiB pages.

A decode step of one token reads every weight once, and with 4 KiB pages TLB misses take a sixth of
that time. Linux gives large pages to programs that ask for them (transparent_hugepage = madvise,
the default of Debian and Ubuntu), but torch does not.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from torch import Tensor

MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # since Linux 6.1; older kernels merge pages later by themselves
SMALL = 4 << 10
HUGE = 2 << 20
MIN_BYTES = 8 << 20  # smaller regions are not worth a call
MIN_RESIDENT = 0.9  # the share of a large page that must be resident, as collapsing fills the rest
_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\s*(?:\[heap\])?$")


def collapse() -> int:
    """Move large regions of memory to large pages; return the bytes of these regions.

    The call takes about a second per GB, without the GIL, and does nothing without Linux and glibc.
    """
    trim()  # returns memory that loading has freed, which need not be moved
    try:
        libc = ctypes.CDLL(None)
        with open("/proc/self/maps") as file:
            regions = [_ANONYMOUS.match(line.rstrip()) for line in file]
    except (OSError, AttributeError):
        return 0
    asked = 0
    for region in regions:
        if region is None:
            continue
        for begin, length in _resident(libc, int(region[1], 16), int(region[2], 16)):
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
            asked += length
    return asked


def _resident(libc: ctypes.CDLL, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of each run of resident 2 MiB ranges in [begin, end)."""
    begin = -(-begin // HUGE) * HUGE
    count = (end - begin) // HUGE
    if count * HUGE < MIN_BYTES:
        return
    pages = np.zeros((count, HUGE // SMALL), dtype=np.uint8)
    length = ctypes.c_size_t(count * HUGE)
    if libc.mincore(ctypes.c_void_p(begin), length, ctypes.c_void_p(pages.ctypes.data)):
        return  # the region was unmapped since the list was read
    there = np.concatenate(([False], (pages & 1).mean(axis=1) >= MIN_RESIDENT, [False]))
    edges = np.flatnonzero(there[1:] != there[:-1])
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield begin + first * HUGE, (last - first) * HUGE


def trim() -> None:
    """Return freed memory to the system; does nothing without glibc.

    Otherwise malloc keeps the memory, and a thread's heap does not reuse memory freed by other
    threads.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back(tensor: Tensor) -> None:
    """Return the memory of a CPU tensor to the system, even if the tensor is still referenced.

    The tensor's whole pages then read as zeros and take no memory. This does nothing without Linux.

    tensor: a contiguous tensor.
    """
    begin = -(-tensor.data_ptr() // SMALL) * SMALL
    length = (tensor.data_ptr() + tensor.nbytes - begin) // SMALL * SMALL
    if length <= 0:
        return
    try:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_DONTNEED)
    except (OSError, AttributeError):
        return
