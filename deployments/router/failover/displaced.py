"""DisplacedChoices: choices that lost their replica while no other can take them. New requests wait
in the request queue instead (admission/request_queue.py)."""

import asyncio
import itertools
from collections.abc import Callable

from deployments.router.inflight import InflightChoice
from engine.errors import MantaError, Overloaded


class DisplacedChoices:
    """seconds: how long a choice waits at most; then its request fails. wanted: called when some
    begin to wait."""

    def __init__(self, seconds: float, wanted: Callable[[], None] = lambda: None) -> None:
        self._seconds = seconds
        self._wanted = wanted
        self._choices: dict[int, tuple[InflightChoice, asyncio.TimerHandle]] = {}  # by id

    def __len__(self) -> int:
        return len(self._choices)

    def put(self, choices: list[InflightChoice]) -> None:
        loop = asyncio.get_running_loop()
        error = Overloaded(
            f"no replica became ready within {self._seconds:g} s", code="no_replica", retry_after=5
        )
        for choice in choices:
            timer = loop.call_later(self._seconds, choice.inflight.fail, error)
            self._choices[choice.id] = (choice, timer)
        self._wanted()

    def take(self, choice: InflightChoice) -> bool:
        """The choice waits no longer. Returns whether it did."""
        _, timer = self._choices.pop(choice.id, (None, None))
        if timer is not None:
            timer.cancel()
        return timer is not None

    def fail_all(self, error: MantaError) -> None:
        """No replica will come for them."""
        for together in self.take_all():
            together[0].inflight.fail(error)

    def take_all(self) -> list[list[InflightChoice]]:
        """Take all choices out, those of one request together."""
        waiting = [choice for choice, _ in self._choices.values()]
        for choice in waiting:
            self.take(choice)
        return [list(group) for _, group in itertools.groupby(waiting, lambda one: one.inflight)]
