"""The times in which an event loop could not run because of its own process."""

import asyncio
import time
from collections.abc import Awaitable, Callable

WAKES_S = 0.002
TRIES = 10
PAUSE_S = 0.1


async def gaps(over: Callable[[], bool]) -> list[float]:
    """Return the seconds between the wakes of a task that sleeps for WAKES_S, until `over`.

    What other processes take of the machine is not the loop's doing. So a gap counts as no more
    than the CPU time that this process, all of its threads, had within it.
    """
    lengths: list[float] = []
    wall, spent = time.perf_counter(), time.process_time()
    while not over():
        await asyncio.sleep(WAKES_S)
        now, cpu = time.perf_counter(), time.process_time()
        lengths.append(min(now - wall, cpu - spent))
        wall, spent = now, cpu
    return lengths


async def least(measure: Callable[[], Awaitable[float]], bound: float) -> float:
    """Return the first gap within the bound, else the least of TRIES.

    What holds a loop holds it each time. Neighbours of a test slow its process for a while: they
    share caches and cores with it.
    """
    lengths: list[float] = []
    while len(lengths) < TRIES and (not lengths or min(lengths) > bound):
        if lengths:
            await asyncio.sleep(PAUSE_S * len(lengths))
        lengths.append(await measure())
    return min(lengths)
