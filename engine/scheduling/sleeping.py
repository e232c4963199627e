"""EngineSleep: frees the memory of weights and caches for a sleep, and takes it again."""

import logging
import time
from typing import Protocol

logger = logging.getLogger("manta.engine")


class Sleeper(Protocol):
    """The memory that an engine frees while it sleeps; no step may be in flight."""

    def sleep(self) -> None: ...
    def wake(self) -> None:
        """Take the memory again. Raises MantaError if there is no room."""
        ...


class EngineSleep:
    """The sleep of an engine: when its memory is freed and taken again.

    memory: the memory to free; None = the engine cannot sleep.
    wanted: whether the engine should sleep once it has no request.
    """

    def __init__(self, memory: Sleeper | None) -> None:
        self._memory = memory
        self.wanted = self.asleep = False
        self.wakes, self.wake_seconds = 0, 0.0  # number of wakes; seconds that the last wake took

    def ask(self) -> None:
        if self._memory is None:
            logger.warning("this engine cannot sleep: sleep_in_host_memory is off")
        self.wanted = self._memory is not None and not self.asleep

    def begin(self) -> None:
        """Free the memory."""
        assert self._memory is not None
        began = time.perf_counter()
        self._memory.sleep()
        self.wanted, self.asleep = False, True
        logger.info("asleep after %.2f s", time.perf_counter() - began)

    def end(self) -> None:
        """Take the memory again, or cancel a pending sleep.

        Raises MantaError if there is no room.
        """
        self.wanted = False
        if not self.asleep:
            return
        assert self._memory is not None
        began = time.perf_counter()
        self._memory.wake()
        self.asleep = False
        self.wakes += 1
        self.wake_seconds = time.perf_counter() - began
        logger.info("awake after %.2f s", self.wake_seconds)
