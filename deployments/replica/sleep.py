"""ReplicaSleep: when a replica's engine sleeps, and what becomes of requests until it is awake.

It sleeps when nobody has asked for a while, or when another replica waits for the device and there
is nothing to do; and a replica that is never without work gives the device up all the same after a
while, once what it had begun has ended. A request is held while the engine sleeps and wakes it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from deployments.environment import visible_devices
from deployments.replica.adapters import SubmittedRequest
from deployments.replica.device_lease import DeviceLease
from engine.errors import EngineDead
from engine.messages import StepFrame

logger = logging.getLogger("manta.replica")

_POLL_SECONDS = 0.1
_YIELD_SECONDS = 0.5  # without work, before the device is given to one that waits for it
_LEASE_SECONDS = 10.0  # with work, before no more is begun


@dataclass(frozen=True, slots=True)
class SleepSettings:
    """The settings of an engine that sleeps.

    idle_seconds: seconds without a request, before the engine sleeps.
    wait_seconds: seconds that a request is held for at most, while others keep the device.
    takes_turns: whether replicas share a device, of which one is awake at a time.
    """

    idle_seconds: float = 300.0
    wait_seconds: float = 30.0
    takes_turns: bool = False


class ReplicaSleep:
    """The sleep of one replica's engine, and the requests that wait for it to wake.

    order(what): sends a `Control` and returns its ticket.
    start(submitted): lets a request go on.
    refuse(submitted, message): ends a request.
    busy(): returns how many requests of routers have not ended, those that are held here included.
    """

    def __init__(
        self,
        settings: SleepSettings,
        *,
        order: Callable[[str], int],
        start: Callable[[SubmittedRequest], None],
        refuse: Callable[[SubmittedRequest, str], None],
        busy: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._order = order
        self._start = start
        self._refuse = refuse
        self._busy = busy
        self._lease = DeviceLease(visible_devices()) if settings.takes_turns else None
        self._open = False  # requests go on
        self._held: list[tuple[float, SubmittedRequest]] = []  # since when
        self._asked = asyncio.Event()
        self._used = time.monotonic()
        self._news: asyncio.Future[None] | None = None
        self._done: Callable[[StepFrame], bool] = lambda frame: False
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """Requests that wait for the engine to be awake."""
        return sum(submitted.wanted for _, submitted in self._held)

    async def before_start(self) -> None:
        """Wait for the device, which the start of the engine needs."""
        if self._lease is not None and not await self._lease.take(0):
            logger.info("waiting for the device, which another replica uses")
            await self._lease.take()

    def begin(self) -> None:
        """The engine is ready and awake."""
        self._open, self._used = True, time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def submit(self, submitted: SubmittedRequest) -> None:
        self._used = time.monotonic()
        if self._open:
            self._start(submitted)
        else:
            self._held.append((time.monotonic(), submitted))
            self._asked.set()

    def on_frame(self, frame: StepFrame) -> None:
        if self._news is not None and not self._news.done() and self._done(frame):
            self._news.set_result(None)

    def stop(self) -> None:
        """The engine is to end. The device stays taken until `close`."""
        if self._task is not None:
            self._task.cancel()
        self._open = False
        self._held.clear()

    def close(self) -> None:
        """The engine has ended."""
        if self._lease is not None:
            self._lease.release()
            self._lease.close()

    async def _run(self) -> None:
        try:
            await self._sleep_and_wake()
        except EngineDead as error:  # its client tells the replica
            logger.info("no more sleep: %s", error)

    async def _sleep_and_wake(self) -> None:
        while True:
            await self._until_unused()
            await self._do("sleep", asleep=True)
            if self._lease is not None:
                self._lease.release()
            logger.info("asleep: weights in host memory")
            await self._until_wanted()
            began = time.monotonic()
            await self._do("wake", asleep=False)
            logger.info("awake after %.2f s", time.monotonic() - began)
            self._open, self._used = True, time.monotonic()
            held, self._held = self._held, []
            for _, submitted in held:
                if submitted.wanted:
                    self._start(submitted)

    async def _until_unused(self) -> None:
        """Returns with nothing at the engine, and requests held from then on."""
        wanted_since: float | None = None
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if self._busy() > self.held:
                self._used = now
            wanted = self._lease is not None and self._lease.wanted()
            if not wanted:
                wanted_since = None
            elif wanted_since is None:
                wanted_since = now
            unused = now - self._used
            enough = _YIELD_SECONDS if wanted else self._settings.idle_seconds
            over = wanted_since is not None and now - wanted_since >= _LEASE_SECONDS
            if over or unused >= min(enough, self._settings.idle_seconds):
                self._open = False
            if not self._open and self._busy() == self.held:
                return

    async def _until_wanted(self) -> None:
        """Returns when somebody waits for the engine, and it may have the device."""
        while True:
            self._asked.clear()
            self._held = [entry for entry in self._held if entry[1].wanted]
            if not self._held:
                await self._asked.wait()
                continue
            since = min(since for since, _ in self._held)
            left = since + self._settings.wait_seconds - time.monotonic()
            if self._lease is None or await self._lease.take(max(0.0, left)):
                return
            late = time.monotonic() - self._settings.wait_seconds
            for since, submitted in self._held:
                if since <= late and submitted.wanted:
                    self._refuse(submitted, _TAKEN.format(self._settings.wait_seconds))

    async def _do(self, what: str, *, asleep: bool) -> None:
        """Order it, and wait until the engine says that it is so."""
        self._news = asyncio.get_running_loop().create_future()
        ticket = self._order(what)
        self._done = lambda frame: frame.ticket >= ticket and frame.stats.asleep is asleep
        await self._news


_TAKEN = (
    "the model sleeps, and other models have used its device for {:g} s; try again, or give it a "
    "device that it does not share"
)
