"""LoadClient: sends a plan's requests at their planned times, in one process and one event loop.

    intended ----- lateness -----> sent --- connect ---> first byte --> chunks ... --> end
    |<------------------------- ttft -------------------------------->|
    |<------------------------- e2e ------------------------------------------------->|

An open loop never waits for an answer before the next request, so the number of requests in flight
depends on the server. In a closed loop the intended time is the end of an earlier request, or the
end of the pause (Retry-After) after a refused one.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import msgspec

from loadtest.client.attempt import RequestAttempt
from loadtest.http import Address, ConnectionPool, HttpConnection, clock, request_head, with_body
from loadtest.measure.records import RequestRecord
from loadtest.measure.verify import ReceivedAnswer, Reference, check, count_slips
from loadtest.scenario.requests import RequestSpec
from loadtest.scenario.schedule import PhasePlan, Visit
from loadtest.scenario.schema import Target, read_key

_SWEEP_S = 0.1
_CPU_WINDOW_S = 5.0
_REFUSED_PAUSE_S = 0.1
_REFUSED = ("connect", "http_429", "http_503", "http_5xx")  # after which the next request waits


class ClientProgress(msgspec.Struct):
    """The progress that one client process reports while it runs.

    Counts are since the process's start; ttft and late have the values (seconds) since the last
    report.
    """

    phase: str = ""
    sent: dict[str, int] = {}
    done: dict[str, int] = {}
    failed: int = 0
    cancelled: int = 0
    different: int = 0
    tokens: int = 0
    ttft: list[float] = []
    late: list[float] = []
    errors: dict[str, int] = {}
    cpu_share: float = 0.0


class LoadClient:
    """A client that sends a plan's requests and records each request.

    sink: called once with each request's record, in the order in which requests end.
    """

    def __init__(
        self,
        target: Target,
        sink: Callable[[RequestRecord], None],
        *,
        references: dict[str, Reference] | None = None,
        keep: Callable[[RequestSpec, RequestRecord, ReceivedAnswer], None] | None = None,
        barrier: Callable[[], Awaitable[float]] | None = None,
        proxies: Sequence[int] = (),
    ) -> None:
        """Set up a client, which sends nothing yet.

        references: key of a question -> answer to compare with.
        keep: called with each answer.
        barrier: awaited at the end of a phase that waits for its answers; returns the time at which
            all processes of the run begin the next phase.
        proxies: ports on this machine to connect to instead of the servers.
        """
        self._target = target
        self._sink, self._references, self._keep = sink, references, keep
        self._barrier = barrier
        addresses = [Address.of(url) for url in target.urls]
        if proxies:
            addresses = [
                address._replace(host="127.0.0.1", port=port)
                for address, port in zip(addresses, proxies, strict=True)
            ]
        self._pools = [ConnectionPool(address) for address in addresses]
        headers = {"accept": "text/event-stream, application/json", "x-return-timing": "1"}
        if target.key_file is not None:
            headers["authorization"] = f"Bearer {read_key(target.key_file)}"
        self._headers = headers | target.headers
        watched = references is not None or keep is not None
        self._token_ids = watched if target.token_ids is None else target.token_ids
        self._heads: dict[tuple[int, str, tuple[tuple[str, str], ...]], bytes] = {}
        self._open: dict[RequestAttempt, Callable[[float], None] | None] = {}
        self._connecting: dict[RequestAttempt, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slips: list[tuple[RequestRecord, ReceivedAnswer, Reference]] = []
        self._stop = asyncio.Event()
        self._origin = 0.0
        self.progress = ClientProgress()
        self.cpu_share = 0.0

    def stop(self) -> None:
        """Stop sending, and close all connections."""
        self._stop.set()

    async def run(self, plans: list[PhasePlan], origin: float) -> None:
        """Run all phases. origin: time.monotonic() at time 0 of the records, not in the past."""
        self._origin = origin
        gc.collect()
        # Exclude existing objects from garbage collections, whose pauses would show as lateness.
        # If the caller has frozen objects before, they stay frozen.
        thaws = not gc.get_freeze_count()
        gc.freeze()
        watch = [asyncio.create_task(self._sweep()), asyncio.create_task(self._watch_cpu())]
        try:
            begin = origin
            for plan in plans:
                if self._stop.is_set():
                    break
                self.progress.phase = plan.phase.name
                begin = await self._phase(plan, begin)
            await self._drain()
        finally:
            now = clock()
            for attempt in list(self._open):
                attempt.cancel(now)
            for task in (*watch, *self._tasks):
                task.cancel()
            await asyncio.gather(*watch, *self._tasks, return_exceptions=True)
            self.close()
            for record, answer, reference in self._slips:
                self._sink(count_slips(record, answer, reference))
            if thaws:
                gc.unfreeze()

    async def ask(self, plan: PhasePlan, number: int, spec: RequestSpec) -> None:
        """Send one request alone and wait for its answer. Its record goes to the sink, too."""
        over = asyncio.Event()
        self._send(plan, number, None, spec, clock(), lambda ended: over.set())
        try:
            async with asyncio.timeout(self._target.timeout):
                await over.wait()
        except TimeoutError:
            for attempt in list(self._open):
                attempt.fail("timeout", f"not done after {self._target.timeout:g} s", clock())

    def close(self) -> None:
        """Close idle connections."""
        for pool in self._pools:
            pool.close()

    async def _phase(self, plan: PhasePlan, begin: float) -> float:
        """Run a phase that starts at `begin`; return the start time of the next phase."""
        if plan.concurrency is not None:
            await self._wait(begin)
            await self._closed(plan, begin)
            if plan.seconds is not None and not plan.drain and plan.requests is None:
                return begin + plan.seconds
            if plan.drain:
                await self._drain()
            return await self._together(begin)
        for visit in plan.visits:
            due = begin + visit.t
            if due - clock() > 0:
                await self._wait(due)
            if self._stop.is_set():
                return due
            self._visit(plan, visit, 0, due)
        assert plan.seconds is not None
        end = begin + plan.seconds
        await self._wait(end)
        if plan.drain:
            await self._drain()
            return await self._together(end)
        return end

    async def _together(self, least: float) -> float:
        """Return the common start time of the next phase, agreed on with the other processes; at
        least `least`.
        """
        if self._barrier is None or self._stop.is_set():
            return max(least, clock())
        together, stopped = asyncio.ensure_future(self._barrier()), self._stopped()
        both: list[asyncio.Future[Any]] = [together, stopped]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not together.done():
            together.cancel()
            return clock()
        return max(least, together.result())

    def _stopped(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._stop.wait())

    async def _wait(self, until: float) -> None:
        """Wait until a time of the clock, or until stop()."""
        if (seconds := until - clock()) <= 0:
            await asyncio.sleep(0)
        elif seconds < 0.2:
            await asyncio.sleep(seconds)
        else:
            try:
                async with asyncio.timeout(seconds):
                    await self._stop.wait()
            except TimeoutError:
                return

    async def _drain(self) -> None:
        while (self._open or self._tasks) and not self._stop.is_set():
            await asyncio.sleep(0.02)

    def _visit(self, plan: PhasePlan, visit: Visit, turn: int, intended: float) -> None:
        """Send one turn of a visit. Its answer schedules the next turn."""
        session = visit.index if visit.thinks else None
        after: Callable[[float], None] | None = None
        if turn < len(visit.thinks):

            def after(ended: float) -> None:
                due = ended + visit.thinks[turn]
                self._task(self._later(plan, visit, turn + 1, due))

        self._send(plan, visit.index + turn, session, plan.spec(visit, turn), intended, after)

    async def _later(self, plan: PhasePlan, visit: Visit, turn: int, due: float) -> None:
        await self._wait(due)
        if not self._stop.is_set():
            self._visit(plan, visit, turn, due)

    async def _closed(self, plan: PhasePlan, begin: float) -> None:
        """Keep `concurrency` requests in flight until the phase's duration is over or its requests
        are used up.
        """
        assert plan.concurrency is not None
        numbers = iter(range(plan.requests)) if plan.requests is not None else count()
        end = None if plan.seconds is None else begin + plan.seconds
        step, first = plan.step, plan.first
        over = asyncio.Event()
        active = 0

        def next_one(intended: float) -> None:
            nonlocal active
            ended = self._stop.is_set() or (end is not None and intended >= end)
            if not ended and (pause := intended - clock()) > 0:
                asyncio.get_running_loop().call_later(pause, next_one, intended)
                return
            number = None if ended else next(numbers, None)
            if number is None:
                active -= 1
                if not active:
                    over.set()
                return
            index = first + number * step
            self._send(plan, index, None, plan.generator.spec(index), intended, next_one)

        active = plan.concurrency
        if not active:  # there are more client processes than concurrent requests
            over.set()
        for _ in range(plan.concurrency):
            next_one(begin)
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(over.wait()), self._stopped()]
        timeout = None if end is None or plan.drain else max(0.0, end - clock())
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _send(
        self,
        plan: PhasePlan,
        index: int,
        session: int | None,
        spec: RequestSpec,
        intended: float,
        after: Callable[[float], None] | None,
    ) -> None:
        body = spec.body(token_ids=self._token_ids, chunk_usage=self._target.chunk_usage)
        at = index % len(self._pools)
        pool = self._pools[at]
        where = (at, spec.path, tuple(spec.headers.items()))
        head = self._heads.get(where)
        if head is None:
            headers = self._headers | spec.headers
            head = self._heads[where] = request_head(pool.address, "POST", spec.path, headers)
        request = with_body(head, body)
        keep = self._keep is not None or self._references is not None
        now = clock()
        attempt = RequestAttempt(
            plan, index, session, spec, intended, now, self._origin, self._done, keep
        )
        self._open[attempt] = after
        sent, phase = self.progress.sent, plan.phase.name
        sent[phase] = sent.get(phase, 0) + 1
        self.progress.late.append(now - intended)
        if spec.cancel_after is not None:
            asyncio.get_running_loop().call_later(spec.cancel_after, self._cancel, attempt)
        connection = None if spec.slow_pause else pool.take_connection(now)
        if connection is not None:
            attempt.connection = connection
            connection.send(request, attempt)
        else:
            task = asyncio.create_task(self._connect(pool, attempt, request))
            self._connecting[attempt] = task
            self._keep_task(task)

    def _cancel(self, attempt: RequestAttempt) -> None:
        if attempt in self._open:
            attempt.cancel(clock())

    async def _connect(self, pool: ConnectionPool, attempt: RequestAttempt, request: bytes) -> None:
        connection: HttpConnection | None = None
        try:
            connection = await pool.connect(self._target.connect_timeout, attempt.spec.slow_pause)
        except TimeoutError:
            attempt.fail("connect", "no connection within connect_timeout", clock())
        except OSError as error:
            attempt.fail("connect", str(error), clock())
        finally:
            self._connecting.pop(attempt, None)
        if connection is None:
            return
        if attempt not in self._open:  # the request was cancelled meanwhile
            connection.abandon()
            return
        now = clock()
        attempt.connect_s = now - attempt.sent
        attempt.last_byte = now
        attempt.connection = connection
        connection.send(request, attempt)

    def _task(self, work: "asyncio._CoroutineLike[None]") -> None:
        self._keep_task(asyncio.create_task(work))

    def _keep_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _done(
        self, attempt: RequestAttempt, record: RequestRecord, answer: ReceivedAnswer | None
    ) -> None:
        after = self._open.pop(attempt)
        connecting = self._connecting.pop(attempt, None)
        if connecting is not None and connecting is not asyncio.current_task():
            connecting.cancel()
        reference = None
        if answer is not None and self._references is not None and attempt.spec.repeatable:
            reference = self._references.get(attempt.spec.key())
            record = check(record, answer, reference)
        if answer is not None and self._keep is not None:
            self._keep(attempt.spec, record, answer)
        self._count(attempt, record)
        if record.verified == "different" and record.ok:
            assert answer is not None and reference is not None
            self._slips.append((record, answer, reference))
        else:
            self._sink(record)
        if after is None or self._stop.is_set():
            return
        # Wait after a refusal, as clients do: a storm of requests would measure itself.
        refused = record.error_class in _REFUSED
        pause = max(_REFUSED_PAUSE_S, attempt.retry_after_s) if refused else 0.0
        after(self._origin + record.end_s + pause)

    def _count(self, attempt: RequestAttempt, record: RequestRecord) -> None:
        progress = self.progress
        progress.done[record.phase] = progress.done.get(record.phase, 0) + 1
        progress.tokens += record.output_tokens
        if record.error_class is not None:
            progress.failed += 1
            name = record.error_class
            progress.errors[name] = progress.errors.get(name, 0) + 1
        progress.cancelled += record.cancelled
        progress.different += record.verified == "different"
        if attempt.first_token is not None:
            progress.ttft.append(attempt.first_token)

    async def _sweep(self) -> None:
        """Fail the requests that time out. One periodic check replaces a timer per request."""
        target = self._target
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = clock()
            for attempt in list(self._open):
                if attempt in self._connecting:
                    continue
                if now - attempt.last_byte > target.chunk_timeout:
                    attempt.fail("timeout", f"no byte for {target.chunk_timeout:g} s", now)
                elif now - attempt.sent > target.timeout:
                    attempt.fail("timeout", f"not done after {target.timeout:g} s", now)

    async def _watch_cpu(self) -> None:
        """Update cpu_share twice a second: the highest CPU share of any five seconds, or of a whole
        shorter run.
        """
        samples = deque([(clock(), time.process_time())])
        try:
            while True:
                await asyncio.sleep(0.5)
                samples.append((clock(), time.process_time()))
                share = (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
                self.progress.cpu_share = share
                if samples[-1][0] - samples[0][0] >= _CPU_WINDOW_S:
                    samples.popleft()
                    self.cpu_share = max(self.cpu_share, share)
        finally:
            wall, cpu = clock(), time.process_time()
            if not self.cpu_share and wall - samples[0][0] > 0.5:
                self.cpu_share = (cpu - samples[0][1]) / (wall - samples[0][0])
