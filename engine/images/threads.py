"""share_out: runs work on pictures in this thread and in idle helper threads.

`prepares` counts the pictures that are decoded and resized, so that a lone one is resized by
several threads.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MOST = 4  # threads for one picture; Pillow lets others run while it decodes and resizes


_lock = threading.Lock()  # guards `_prepared`
_prepared = 0  # pictures that are decoded or resized now


@contextmanager
def prepares() -> Iterator[None]:
    """Count, while open, one more picture that this process decodes and resizes."""
    global _prepared
    with _lock:
        _prepared += 1
    try:
        yield
    finally:
        with _lock:
            _prepared -= 1


def alone() -> bool:
    """Whether at most one picture is decoded or resized now."""
    return _prepared < 2


@cache
def threads() -> int:
    """Return how many threads work on one picture: one a core, at most 4."""
    return min(_MOST, len(os.sched_getaffinity(0)))


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads() - 1), thread_name_prefix="pictures")


def share_out(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the results of `work` for all items, some of which other threads compute.

    Work may share out parts of its own. The first error is raised once no item is being worked on.
    """
    first, *others = items
    handed = [(item, _helpers().submit(work, item)) for item in others]
    try:
        results = [work(first)]
        for item, future in handed:
            # Where the helpers are busy with other pictures, this thread does not wait for them.
            results.append(work(item) if future.cancel() else future.result())
        return results
    finally:
        for _, future in handed:
            if not future.cancel():
                future.exception()
