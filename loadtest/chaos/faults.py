"""Faults during a run: processes of the tested instance are killed or paused, or the network
between clients and server is delayed, paused or cut.

    kill-replica@30s                      once, 30 s after the run's start
    kill-engine every 20s                 at 20 s, 40 s, ... until the run ends
    kill-replica every 20s from 5s to 65s
    kill-replica@30s x2                   two of them at once
    pause-router@10s for 3s               SIGSTOP, and SIGCONT 3 s later
    delay-network@10s for 5s by 200ms     every byte 200 ms later, in each direction
    pause-network@10s for 3s              no byte passes, in either direction
    kill-network@10s                      every connection is reset

Each fault with its victim, and the start of a replacement process, is recorded as a FaultMark of
the run. The victim is chosen at random, by the seed, among the live processes sorted by age.
"""

import asyncio
import heapq
import random
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadtest.chaos.network_fault import NetworkProxy
from loadtest.chaos.server_processes import TARGETS, ServerProcess, instance_at
from loadtest.errors import ScenarioError
from loadtest.measure.records import FaultMark

_POLL = 0.2  # seconds between polls for a process that replaces a killed one
_ACTIONS = ("kill", "pause", "delay")
NETWORK = "network"  # the network between clients and server: see network_fault.py
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = r"(\d+(?:\.\d+)?)(ms|s|min|m|h)"
_FAULT = re.compile(
    rf"(?P<action>[a-z]+)-(?P<target>[a-z]+)\s*"
    rf"(?:@\s*(?P<at>{_TIME})|every\s+(?P<every>{_TIME})"
    rf"(?:\s+from\s+(?P<start>{_TIME}))?(?:\s+to\s+(?P<end>{_TIME}))?)"
    rf"(?:\s+for\s+(?P<hold>{_TIME}))?(?:\s+by\s+(?P<by>{_TIME}))?(?:\s+x(?P<count>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, with times in seconds since the run's start.

    every: interval of a repeated fault; None for a single one.
    hold: duration of a pause or a delay.
    by: seconds by which the network is delayed.
    """

    action: str
    target: str
    start: float
    every: float | None = None
    end: float | None = None
    hold: float = 0.0
    by: float = 0.0
    count: int = 1

    @property
    def name(self) -> str:
        return f"{self.action} {self.target}"


class FaultClock(Protocol):
    """The clock of a run, as faults use it: see runner.RunClock."""

    @property
    def origin(self) -> float: ...

    @property
    def proxies(self) -> Sequence[NetworkProxy]: ...

    @property
    def spoilt(self) -> list[str]: ...

    def now(self) -> float: ...

    def mark(self, what: str, t: float | None = None) -> None: ...


class ProcessFinder(Protocol):
    """A finder of processes to kill or pause: ServerInstance, or a test's stub."""

    def find(self, target: str) -> list[ServerProcess]: ...


def parse_chaos(text: str | Sequence[str]) -> list[Fault]:
    """Parse faults from one comma-separated text or several texts. Raises ScenarioError."""
    texts = text.split(",") if isinstance(text, str) else text
    return [_parse(part.strip()) for part in texts if part.strip()]


def _parse(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise ScenarioError(
            f"cannot read the fault {text!r}; for example: kill-replica@30s, "
            "kill-engine every 20s, pause-router@10s for 3s"
        )
    action, target = match["action"], match["target"]
    targets = [*TARGETS, "server", NETWORK]
    if action not in _ACTIONS:
        raise ScenarioError(f"{text!r}: no action {action!r}; there are: {', '.join(_ACTIONS)}")
    if target not in targets:
        raise ScenarioError(f"{text!r}: no target {target!r}; there are: {', '.join(targets)}")
    if action == "delay" and target != NETWORK:
        raise ScenarioError(f"{text!r}: only the network can be delayed")
    if (action == "kill") == (match["hold"] is not None):
        raise ScenarioError(f"{text!r}: all but a kill needs 'for' and a time")
    if (action == "delay") != (match["by"] is not None):
        raise ScenarioError(f"{text!r}: a delay, and only a delay, needs 'by' and a time")
    every = _seconds(match["every"]) if match["every"] else None
    if every is not None and every <= 0:
        raise ScenarioError(f"{text!r}: every 0 s is too often")
    start = match["at"] or match["start"] or match["every"]
    end = _seconds(match["end"]) if match["end"] else None
    count = int(match["count"] or 1)
    if not 1 <= count <= 1000:
        raise ScenarioError(f"{text!r}: the count must be in 1..1000")
    hold = _seconds(match["hold"]) if match["hold"] else 0.0
    by = _seconds(match["by"]) if match["by"] else 0.0
    return Fault(action, target, _seconds(start), every, end, hold, by, count)


def _seconds(text: str) -> float:
    number = re.fullmatch(_TIME, text)
    assert number is not None
    return float(number[1]) * _UNITS[number[2]]


def schedule(faults: Sequence[Fault]) -> Iterator[tuple[float, Fault]]:
    """Yield (seconds, fault) in order of time; endless if a fault repeats without end."""
    return heapq.merge(*map(_times, faults), key=lambda item: item[0])


def _times(fault: Fault) -> Iterator[tuple[float, Fault]]:
    t, number = fault.start, 0
    while fault.end is None or t <= fault.end:
        yield t, fault
        if fault.every is None:
            return
        number += 1
        t = fault.start + number * fault.every


def check_syntax(text: str) -> str:
    """Return the text if parse_chaos() accepts it. Raises ValueError."""
    try:
        parse_chaos(text)
    except ScenarioError as error:
        raise ValueError(str(error)) from None
    return text


def needs_proxies(texts: Sequence[str]) -> bool:
    """Whether the faults need clients to reach the server through proxies."""
    return any(fault.target == NETWORK for text in texts for fault in parse_chaos(text))


def beside(
    texts: Sequence[str], url: str, seed: int
) -> Callable[[FaultClock], Awaitable[None]] | None:
    """Return a coroutine function that causes a run's faults during its load; None without faults.

    Raises ScenarioError if no process at the URL can be a victim.
    """
    faults = [fault for text in texts for fault in parse_chaos(text)]
    if not faults:
        return None
    processes = [fault for fault in faults if fault.target != NETWORK]
    chaos = Chaos(processes, url=url, seed=seed) if processes else None

    async def harm(clock: FaultClock) -> None:
        network = asyncio.gather(
            *(_disturb(fault, clock) for fault in faults if fault.target == NETWORK)
        )
        if chaos is not None:
            chaos.start(clock.origin)
        try:
            while chaos is not None and chaos.running:
                await asyncio.sleep(_POLL)
            await network
        finally:
            network.cancel()
            for fault in faults:
                if fault.start > clock.now():
                    late = f"{fault.name}, due at {fault.start:g} s: the load had ended before"
                    clock.spoilt.append(late)
            for mark in chaos.stop() if chaos is not None else ():
                clock.mark(mark.what, mark.t)

    return harm


async def _disturb(fault: Fault, clock: FaultClock) -> None:
    """Cause one network fault, each time it is due."""
    for t, _ in _times(fault):
        await asyncio.sleep(max(0.0, clock.origin + t - time.monotonic()))
        if fault.action == "kill":
            cut = sum(proxy.cut() for proxy in clock.proxies)
            clock.mark(f"{fault.name} ({cut} connections)")
            continue
        by = f" by {fault.by * 1000:g} ms" if fault.by else ""
        clock.mark(f"{fault.name}{by} for {fault.hold:g} s")
        for proxy in clock.proxies:
            if fault.action == "pause":
                proxy.hold()
            else:
                proxy.delay_s = fault.by
        await asyncio.sleep(fault.hold)
        for proxy in clock.proxies:
            if fault.action == "pause":
                proxy.release()
            else:
                proxy.delay_s = 0.0
        clock.mark(f"network as before ({fault.action})")


class Chaos:
    """A thread that causes the faults. Use: `start(zero)`, then `stop()`.

    finder: finds the victims; None: the instance that listens at `url`. Raises ScenarioError before
    any fault is caused if a fault has no possible victim.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        url: str = "",
        seed: int = 0,
        finder: ProcessFinder | None = None,
    ) -> None:
        self._finder: ProcessFinder = finder if finder is not None else instance_at(url)
        for fault in faults:
            if not self._finder.find(fault.target):
                raise ScenarioError(f"{fault.name}: there is no {fault.target} process to harm")
        self._schedule = schedule(faults)
        self._next = next(self._schedule, None)
        self._random = random.Random(seed)
        self._zero = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._marks: list[FaultMark] = []
        self._paused: list[tuple[float, ServerProcess, str]] = []
        # (time, target, pids, count) for each killed target
        self._lost: list[tuple[float, str, set[int], int]] = []
        self._error: Exception | None = None

    def start(self, zero: float) -> None:
        """Start the thread. zero: time.monotonic() at the run's start."""
        self._zero = zero
        self._thread.start()

    def stop(self) -> list[FaultMark]:
        """Stop the thread, resume paused processes, and return the marks so far, in order.

        Raises the error of a fault that failed.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for _, process, _ in self._paused:
            process.send(signal.SIGCONT)
        self._paused.clear()
        if self._error is not None:
            raise self._error
        return self.marks

    @property
    def running(self) -> bool:
        """Whether the thread may cause more faults or record more marks."""
        return self._thread.is_alive()

    @property
    def marks(self) -> list[FaultMark]:
        return sorted(self._marks, key=lambda mark: mark.t)

    def _now(self) -> float:
        return time.monotonic() - self._zero

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                now = self._now()
                while self._next is not None and self._next[0] <= now:
                    self._strike(self._next[1])
                    self._next = next(self._schedule, None)
                self._wake(now)
                self._look_for_returned()
                waits = [t for t, *_ in self._paused]
                if self._next is not None:
                    waits.append(self._next[0])
                if self._lost:
                    waits.append(now + _POLL)
                if not waits:
                    return
                self._stop.wait(max(0.0, min(waits) - self._now()))
        # raised again by stop(), as a thread cannot raise it in the caller
        except Exception as error:
            self._error = error

    def _strike(self, fault: Fault) -> None:
        alive = self._finder.find(fault.target)
        victims = self._random.sample(alive, min(fault.count, len(alive)))
        for victim in victims:
            kill = fault.action == "kill"
            struck = victim.send(signal.SIGKILL if kill else signal.SIGSTOP)
            outcome = f"pid {victim.pid}" if struck else f"pid {victim.pid} had ended"
            self._mark(f"{fault.name} ({outcome})")
            if struck and not kill:
                self._paused.append((self._now() + fault.hold, victim, fault.target))
        if not victims:
            self._mark(f"{fault.name}: none was there")
        if victims and fault.action == "kill":
            self._lost.append((self._now(), fault.target, {p.pid for p in alive}, len(victims)))

    def _wake(self, now: float) -> None:
        for item in [item for item in self._paused if item[0] <= now]:
            self._paused.remove(item)
            item[1].send(signal.SIGCONT)
            self._mark(f"{item[2]} goes on (pid {item[1].pid})")

    def _look_for_returned(self) -> None:
        for item in list(self._lost):
            since, target, before, count = item
            new = [p for p in self._finder.find(target) if p.pid not in before]
            if len(new) >= count:
                self._lost.remove(item)
                self._mark(f"{target} process back after {self._now() - since:.1f} s")

    def _mark(self, what: str) -> None:
        self._marks.append(FaultMark(round(self._now(), 3), what))
