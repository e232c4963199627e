"""Measures how long an event loop was blocked by its own process."""

import asyncio
import time
from collections.abc import Awaitable, Callable

WAKES_S = 0.002
TRIES = 10
PAUSE_S = 0.1


async def gaps(over: Callable[[], bool]) -> list[float]:
    """Return the seconds between wake-ups of a task that sleeps for WAKES_S, until `over()`.

    Time in which other processes use the cores is excluded: a gap counts as at most the CPU time
    that all threads of this process used in it.
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
    """Return the first measured gap within the bound, else the smallest of TRIES measurements.

    Code that blocks a loop blocks it in each try. Other processes, which share caches and cores
    with this one, slow it only for a while.
    """
    lengths: list[float] = []
    while len(lengths) < TRIES and (not lengths or min(lengths) > bound):
        if lengths:
            await asyncio.sleep(PAUSE_S * len(lengths))
        lengths.append(await measure())
    return min(lengths)
