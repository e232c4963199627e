"""Time limits for calls that may block for ever.

Ray's calls wait for a GCS that is gone, and neither a signal nor an exception interrupts them.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")

_overdue = False


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the call's result, or raise its exception. Raises TimeoutError after `seconds`.

    An overdue call's thread goes on, so the process must then end by `leave`.
    """
    global _overdue
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        _overdue = True
        raise TimeoutError(f"no answer for {seconds:g} s")
    return result[0]


def leave(code: int) -> NoReturn:
    """End the process; skip Ray's exit handlers if one of its calls hangs, as they would hang,
    too."""
    if not _overdue:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
