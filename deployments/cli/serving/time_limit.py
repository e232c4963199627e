"""Calls that may block for ever, each with a time limit. Ray's wait for a GCS that is gone, and
neither a signal nor an exception gets them out of it."""

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")

_overdue = False


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what the call returns, or raise what it raises. Raises TimeoutError when it takes
    longer; its thread then goes on, and `leave` is the way to end the process."""
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
    """End the process, without Ray's farewells if one of its calls hangs: they would hang, too."""
    if not _overdue:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
