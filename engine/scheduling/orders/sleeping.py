"""EngineSleep: frees the memory of weights and caches for a sleep, and allocates it on wake."""

import logging
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from engine.errors import InvalidRequest
from engine.messages import CANNOT_SLEEP, PARTS, WEIGHTS, Answer

logger = logging.getLogger("manta.engine")

# levels of a sleep: weights are moved to host memory, or dropped
KEEP, DROP = 1, 2
CHECK = 0  # level of a request that only checks whether a sleep would be refused


class Sleeper(Protocol):
    """The memory that an engine frees while it sleeps; no step may be in flight."""

    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        """Free the memory of the given parts, all of which are allocated.

        drop: whether the weights are lost, because others will replace them.
        """
        ...

    def wake(self, parts: Collection[str] = PARTS) -> None:
        """Allocate the given freed parts again. Raises MantaError if memory does not suffice."""
        ...


class EngineSleep:
    """The sleep state of an engine: which memory parts are freed, and pending requests to sleep.

    memory: the memory to free; None = the engine cannot sleep.
    wanted: the parts to free once no request is left.
    parts: the parts that are freed now.
    dropped: whether the weights are dropped, so that no step can run until new ones are loaded.
    """

    def __init__(self, memory: Sleeper | None) -> None:
        self._memory = memory
        self.wanted: frozenset[str] = frozenset()
        self._drop = False
        self._pending_tickets: list[int] = []  # tickets to be answered once the engine sleeps
        self._answers: list[Answer] = []
        self.parts: frozenset[str] = frozenset()
        self.dropped = False
        self.wakes, self.wake_seconds = 0, 0.0  # number of wakes; seconds that the last wake took

    @property
    def asleep(self) -> bool:
        """Whether weights or caches are freed."""
        return bool(self.parts)

    def ask(self, level: int = KEEP, parts: Sequence[str] = (), ticket: int = 0) -> None:
        """Ask for a sleep; see `take_answers`.

        level: KEEP, DROP, or CHECK, which changes nothing.
        parts: the parts to free; none = all.
        """
        if self._memory is None:
            logger.warning("this engine cannot sleep: sleep_in_host_memory is off")
            message = "sleep: this engine was not made to sleep; set sleep_in_host_memory"
            self._answers.append(Answer(ticket, CANNOT_SLEEP, message, "sleep_in_host_memory"))
            return
        if level not in (CHECK, KEEP, DROP):
            message = f"sleep: level is {KEEP} or {DROP}, not {level}"
            self._answers.append(Answer(ticket, InvalidRequest.code, message, "level"))
            return
        if not self._check_parts(parts, ticket):
            return
        if level == CHECK:
            self._answers.append(Answer(ticket))
            return
        self.wanted = frozenset(parts or PARTS) - self.parts
        self._drop = level == DROP and WEIGHTS in self.wanted
        if self.wanted:
            self._pending_tickets.append(ticket)
        else:
            self._answers.append(Answer(ticket))

    def _check_parts(self, parts: Sequence[str], ticket: int) -> bool:
        """Return whether all parts have known names; if not, answer the ticket with an error."""
        unknown = [part for part in parts if part not in PARTS]
        if unknown:
            message = f"tags: known are {', '.join(PARTS)}, not {unknown[0]!r}"
            self._answers.append(Answer(ticket, InvalidRequest.code, message, "tags"))
        return not unknown

    def begin(self) -> None:
        """Free the memory of the parts in `wanted`, and answer the pending tickets."""
        assert self._memory is not None
        began = time.perf_counter()
        self._memory.sleep(self.wanted, drop=self._drop)
        self.parts |= self.wanted
        self.dropped |= self._drop
        self._settle_pending()
        logger.info("asleep after %.2f s: %s", time.perf_counter() - began, _listed(self.parts))

    def end(self, parts: Sequence[str] = (), ticket: int = 0) -> None:
        """Allocate the memory of the given parts (none = all), and cancel a pending sleep.

        Raises MantaError if memory does not suffice.
        """
        if not self._check_parts(parts, ticket):
            return
        self._settle_pending()
        waking = self.parts & frozenset(parts or PARTS)
        if waking:
            assert self._memory is not None
            began = time.perf_counter()
            self._memory.wake(waking)
            self.parts -= waking
            self.wakes += 1
            self.wake_seconds = time.perf_counter() - began
            logger.info("awake after %.2f s: %s", self.wake_seconds, _listed(waking))
            if self.dropped and not self.parts:
                logger.warning("the weights were dropped: requests wait for new weights")
        self._answers.append(Answer(ticket))

    def _settle_pending(self) -> None:
        """Clear the pending request to sleep, and answer its tickets."""
        self.wanted, self._drop = frozenset(), False
        self._answers += [Answer(ticket) for ticket in self._pending_tickets]
        self._pending_tickets = []

    def replaced(self) -> None:
        """Clear `dropped`, as all weights were replaced."""
        self.dropped = False

    def take_answers(self) -> list[Answer]:
        """Return the answers to finished and refused requests that have a ticket."""
        answers, self._answers = self._answers, []
        return [answer for answer in answers if answer.ticket]


def _listed(parts: Collection[str]) -> str:
    return ", ".join(part for part in PARTS if part in parts)
