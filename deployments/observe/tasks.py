"""The tasks on this thread's event loop, to find those that are left behind."""

import asyncio
from collections import Counter


def tasks() -> dict[str, int]:
    """Return how many tasks there are of each coroutine function, by its qualified name. On a loop
    only."""
    counts = Counter(_name(task) for task in asyncio.all_tasks())
    return dict(sorted(counts.items()))


def _name(task: "asyncio.Task[object]") -> str:
    coroutine = task.get_coro()
    return str(getattr(coroutine, "__qualname__", None) or type(coroutine).__name__)
