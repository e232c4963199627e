"""share_out: runs work on pictures in this thread and in idle helper threads.

`prepares` counts the pictures that are being decoded and resized, so that a single one is resized
by several threads.
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

_MOST = 4  # maximum threads for one picture; Pillow releases the GIL while it decodes and resizes


_lock = threading.Lock()  # guards `_prepared`
_prepared = 0  # number of pictures that are being decoded or resized


@contextmanager
def prepares() -> Iterator[None]:
    """Count one more picture that is being decoded and resized, during the `with` block."""
    global _prepared
    with _lock:
        _prepared += 1
    try:
        yield
    finally:
        with _lock:
            _prepared -= 1


def alone() -> bool:
    """Whether at most one picture is being decoded or resized."""
    return _prepared < 2


@cache
def threads() -> int:
    """Return the number of threads for one picture: one per core, at most 4."""
    return min(_MOST, len(os.sched_getaffinity(0)))


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads() - 1), thread_name_prefix="pictures")


def share_out(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Run `work` for all items, with idle helper threads; return the results.

    `work` may call this function too. The first error is raised once no item is in progress.
    """
    first, *others = items
    handed = [_helpers().submit(work, item) for item in others]
    results: dict[int, R] = {}
    try:
        results[0] = work(first)
        # Helpers begin items in order, so this thread computes those at the end.
        for index in range(len(others), 0, -1):
            if handed[index - 1].cancel():
                results[index] = work(items[index])
        for index, future in enumerate(handed, 1):
            if not future.cancelled():
                results[index] = future.result()
        return [results[index] for index in range(len(items))]
    finally:
        for future in handed:
            if not future.cancel():
                future.exception()
