"""ReplicaSleep: puts a replica's engine to sleep, and holds requests until it is awake.

The engine sleeps after an idle time, or if another replica waits for the device and there is no
work. A replica that is never idle gives up the device after _LEASE_SECONDS, once its running
requests have ended. Requests that arrive during sleep are held, and wake the engine. While a
trainer controls sleep, this module orders neither sleep nor wake.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from deployments.environment import visible_devices
from deployments.replica.adapters import SubmittedRequest
from deployments.replica.device_lease import DeviceLease
from engine.errors import EngineDead, Overloaded
from engine.messages import StepFrame

logger = logging.getLogger("manta.replica")

_POLL_SECONDS = 0.1
_YIELD_SECONDS = 0.5  # idle seconds after which the device is given to a waiting replica
# Seconds for which a busy engine still gets new requests while another replica waits for the
# device.
_LEASE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SleepSettings:
    """The settings of an engine that sleeps.

    idle_seconds: seconds without a request after which the engine sleeps.
    wait_seconds: maximum seconds for which a request is held while other replicas use the device.
    takes_turns: whether replicas share a device, so that only one of them is awake at a time.
    """

    idle_seconds: float = 300.0
    wait_seconds: float = 30.0
    takes_turns: bool = False


class ReplicaSleep:
    """The control of one engine's sleep, and the requests that are held until the engine is awake.

    order: sends a `Control` ("sleep" or "wake") to the engine and returns its ticket.
    start: passes a request on to the engine.
    refuse: ends a request with an error, given its message.
    busy: returns the replica's number of unfinished requests, including held ones.
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
        self._ordered = False  # whether a trainer controls sleep
        self._woken = False  # whether a trainer has ended a sleep that this module began
        self._open = False  # whether requests are passed on rather than held
        # (monotonic seconds when the request was held, request)
        self._held: list[tuple[float, SubmittedRequest]] = []
        self._asked = asyncio.Event()
        self._used = time.monotonic()
        self._news: asyncio.Future[None] | None = None
        self._done: Callable[[StepFrame], bool] = lambda frame: False
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """The number of requests held until the engine is awake."""
        return sum(submitted.wanted for _, submitted in self._held)

    async def before_start(self) -> None:
        """Wait for the device, which the engine needs for its start."""
        if self._lease is not None and not await self._lease.acquire(0):
            logger.info("waiting for the device, which another replica uses")
            await self._lease.acquire()

    def begin(self) -> None:
        """Start monitoring idle times; the engine must be started and awake."""
        self._open, self._used = True, time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def submit(self, submitted: SubmittedRequest) -> None:
        self._used = time.monotonic()
        if self._open:
            self._start(submitted)
        else:
            self._held.append((time.monotonic(), submitted))
            self._asked.set()

    async def let_trainer(self) -> None:
        """Give control of sleep to a trainer until `take_back`, and acquire the device.

        Raises Overloaded if another replica does not release the device.
        """
        self._ordered = True
        if self._lease is None or self._lease.held:
            return
        if not await self._lease.acquire(self._settings.wait_seconds):
            raise Overloaded(_TAKEN.format(self._settings.wait_seconds), code="device_busy")

    def take_back(self) -> None:
        """End `let_trainer`: idle times control sleep again. The engine must be awake."""
        if not self._ordered:
            return
        self._ordered, self._used = False, time.monotonic()
        self._woken = not self._open
        self._asked.set()

    def on_frame(self, frame: StepFrame) -> None:
        if self._news is not None and not self._news.done() and self._done(frame):
            self._news.set_result(None)

    def stop(self) -> None:
        """Stop controlling sleep, because the engine is about to end. The device stays leased until
        `close`."""
        if self._task is not None:
            self._task.cancel()
        self._open = False
        self._held.clear()

    def close(self) -> None:
        """Release the device; the engine must have ended."""
        if self._lease is not None:
            self._lease.release()
            self._lease.close()

    async def _run(self) -> None:
        try:
            await self._sleep_and_wake()
        except EngineDead as error:
            # The engine's client also reports the error to the ReplicaServer.
            logger.info("no more sleep: %s", error)

    async def _sleep_and_wake(self) -> None:
        while True:
            await self._until_unused()
            await self._do("sleep", asleep=True)
            if self._lease is not None and not self._ordered:
                self._lease.release()
            logger.info("asleep: weights in host memory")
            await self._until_wanted()
            began = time.monotonic()
            await self._do("wake", asleep=False)
            logger.info("awake after %.2f s", time.monotonic() - began)
            self._used = time.monotonic()
            self._start_held()

    def _start_held(self) -> None:
        """Send the held requests to the engine, and stop holding requests."""
        self._open, self._woken = True, False
        held, self._held = self._held, []
        for _, submitted in held:
            if submitted.wanted:
                self._start(submitted)

    async def _until_unused(self) -> None:
        """Wait until the engine should sleep, then hold new requests, and return once the engine is
        idle."""
        wanted_since: float | None = None
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if self._ordered or self._busy() > self.held:
                self._used = now
            wanted = self._lease is not None and not self._ordered and self._lease.wanted()
            if not wanted:
                wanted_since = None
            elif wanted_since is None:
                wanted_since = now
            unused = now - self._used
            enough = _YIELD_SECONDS if wanted else self._settings.idle_seconds
            over = wanted_since is not None and now - wanted_since >= _LEASE_SECONDS
            if over or unused >= min(enough, self._settings.idle_seconds):
                self._open = False
            if self._woken or self._ordered:
                self._start_held()
            elif not self._open and self._busy() == self.held:
                return

    async def _until_wanted(self) -> None:
        """Wait until the engine should wake: a trainer has woken it, or a request is held and the
        device lease was acquired.

        A request that was held for wait_seconds without the lease is refused.
        """
        while True:
            self._asked.clear()
            self._held = [entry for entry in self._held if entry[1].wanted]
            if self._woken:
                return
            if self._ordered or not self._held:
                await self._asked.wait()
                continue
            since = min(since for since, _ in self._held)
            seconds_left = since + self._settings.wait_seconds - time.monotonic()
            if self._lease is None or await self._lease.acquire(max(0.0, seconds_left)):
                return
            late = time.monotonic() - self._settings.wait_seconds
            for since, submitted in self._held:
                if since <= late and submitted.wanted:
                    self._refuse(submitted, _TAKEN.format(self._settings.wait_seconds))

    async def _do(self, what: str, *, asleep: bool) -> None:
        """Send a control message to the engine, and wait until its stats confirm the change.

        what: "sleep" or "wake". asleep: the state to wait for.
        """
        self._news = asyncio.get_running_loop().create_future()
        ticket = self._order(what)
        self._done = lambda frame: frame.ticket >= ticket and frame.stats.asleep is asleep
        await self._news


_TAKEN = (
    "the model sleeps, and other models have used its device for {:g} s; try again, or give it a "
    "device that it does not share"
)
