"""tasks: counts the asyncio tasks on this thread's event loop, for finding leaked tasks."""

import asyncio
from collections import Counter


def tasks() -> dict[str, int]:
    """Return {qualified name of a coroutine function: number of its unfinished tasks}.

    Must be called on an event loop.
    """
    counts = Counter(_name(task) for task in asyncio.all_tasks())
    return dict(sorted(counts.items()))


def _name(task: "asyncio.Task[object]") -> str:
    coroutine = task.get_coro()
    return str(getattr(coroutine, "__qualname__", None) or type(coroutine).__name__)
