"""in_thread: work on a request that would hold up the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Larger bodies are read in a thread: up to 20 ms on the loop.
INLINE_CHARS = 16 * 1024
# Two: tokenising frees the interpreter lock only in part, and more would only take turns.
_pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")


async def in_thread(work: Callable[[], T], size: int) -> T:
    """Run now if size (characters or bytes) is small, else off the event loop."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)
