"""within: runs calls that may block for ever with a time limit.

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
    """Run a call in a thread, and return its result or raise its exception.

    Raises TimeoutError after `seconds`. The thread of an overdue call continues, so the process
    must later end by `leave`.
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
    """End the process. If a call of `within` hangs, exit handlers are skipped, as Ray's would hang,
    too."""
    if not _overdue:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
