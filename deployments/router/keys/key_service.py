"""KeyService: a router's background task for API keys and usage.

Once a second, in a thread, the service reads changed keys files, shares counts with the other
routers and writes the usage file.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from deployments.api.key_limits import KeyCount, KeyLimits, period_of
from deployments.cluster_store import prefix, store
from deployments.observe.metrics import RouterMetrics
from deployments.router.inflight import InflightRequest
from deployments.router.keys.key_files import KeyFiles, KeySettings
from deployments.router.keys.usage_log import UsageLine, UsageLog

logger = logging.getLogger("manta.router")

POLL_SECONDS = 1.0
_SHARE_SECONDS = 60.0  # seconds of sharing counts after the last request of a key with limits

_Counts = dict[str, KeyCount]


class SharedCounts:
    """The store in which the routers of an application share the counts of keys with limits.

    The store is Ray's own key-value store: a key has one limit across all routers, and its used
    tokens survive the routers. Methods block, and raise OSError if the store is unavailable.

    router: name of this router, under which its own counts are stored.
    """

    def __init__(self, app: str, router: str) -> None:
        self._folder = f"{prefix(app)}keys/"
        self._own = self._folder + router
        self._put = b""

    def base(self, spent: dict[str, dict[str, int]]) -> None:
        """Store the tokens that keys had used before this application started, unless another
        router has stored them.

        Only the first router's value is right: usage files that a later router reads also have
        tokens of this application, which would then count twice.

        spent: the result of `UsageLog.spent`, {key id: {period: tokens}}.
        """
        for place, length in (("before-day", 10), ("before-month", 7)):
            counts = {
                key: KeyCount(0, 0, period, tokens)
                for key, totals in spent.items()
                for period, tokens in totals.items()
                if len(period) == length
            }
            store("put", self._folder + place, msgspec.msgpack.encode(counts), overwrite=False)

    def exchange(self, counts: _Counts, periods: Collection[str]) -> dict[str, _Counts]:
        """Store this router's counts, and return {store key of a router: its counts} of the others.

        periods: the current day and month; entries of routers without a count in them are deleted.
        """
        data = msgspec.msgpack.encode(counts)
        if data != self._put:
            store("put", self._own, data)
            self._put = data
        by_router: dict[str, _Counts] = {}
        for raw in store("list", self._folder):
            key = raw.decode() if isinstance(raw, bytes) else raw
            if key == self._own or (value := store("get", key)) is None:
                continue
            counts_there = msgspec.msgpack.decode(value, type=_Counts)
            if not counts_there or any(count.period in periods for count in counts_there.values()):
                by_router[key] = counts_there
            else:
                store("del", key)
        return by_router


class KeyService:
    """The API keys, their limits and the usage log of one router, polled once a second.

    on_change: called with the new fields of ApiOptions (`KeyFiles.options`) when keys have changed.
    """

    def __init__(
        self,
        settings: KeySettings,
        log: UsageLog | None,
        shared: SharedCounts | None,
        metrics: RouterMetrics,
    ) -> None:
        self.limits = KeyLimits()
        self.on_change: Callable[[dict[str, Any]], None] = lambda _: None
        self._files = KeyFiles(settings)
        self._keyed = bool(settings.user or settings.admin)
        self._log = log
        self._shared = shared
        self._metrics = metrics
        self._shared_ok = True  # whether the store answered the last time
        self._task: asyncio.Task[None] | None = None
        self._names = self._files.names()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to poll: neither keys nor a usage file."""
        return not self._keyed and self._log is None

    async def start(self) -> dict[str, Any]:
        """Start polling, and return the fields of ApiOptions for the present keys."""
        if not self.idle:
            await asyncio.to_thread(self._first)
            self._names = self._files.names()
            self._task = asyncio.get_running_loop().create_task(self._watch())
        return self._files.options()

    def close(self) -> None:
        """Stop polling, and write the usage of prompts that have ended until now."""
        if self._task is not None:
            self._task.cancel()
        if self._log is not None:
            self._log.flush()

    def ended(self, inflight: InflightRequest) -> None:
        """Charge the tokens of a finished prompt and its output to its API key and model.

        The tokens are added to metrics, the key's limits and the usage log. If this router resumed
        a stream, earlier tokens are left out, as another router has counted them.
        """
        trace = inflight.trace
        before = sum(len(tokens or ()) for tokens in inflight.request.emitted)
        prompt = 0 if inflight.request.emitted else trace.prompt_tokens
        output = max(0, trace.output_tokens - before)
        at = time.time()
        name = ""
        if trace.owner:
            name = self._names.get(trace.owner, trace.owner[:8])
            self._metrics.key_requests.inc(1, name, trace.model)
            self._metrics.key_prompt_tokens.inc(prompt, name, trace.model)
            self._metrics.key_output_tokens.inc(output, name, trace.model)
            self.limits.ended(trace.owner, prompt, output, at)
        if self._log is not None:
            self._log.add_line(
                UsageLine(
                    round(at, 3),
                    trace.id,
                    name,
                    trace.owner,
                    trace.model,
                    prompt,
                    trace.cached,
                    output,
                    round(trace.ended - trace.arrived, 3),
                    trace.finish,
                    trace.error,
                )
            )

    def _first(self) -> None:
        self._files.poll()
        if self._shared is None:
            return
        with contextlib.suppress(OSError):
            if self._log is not None:
                self._shared.base(self._log.spent(time.time()))
            self.limits.hear(self._shared.exchange({}, _periods()), time.time())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.poll()
            except Exception:
                logger.exception("the look at keys and usage failed")

    async def poll(self) -> None:
        """Read changed keys, write the usage file and share counts with the other routers."""
        if await asyncio.to_thread(self._files.poll):
            self._names = self._files.names()
            self.on_change(self._files.options())
        if self._log is not None:
            await asyncio.to_thread(self._log.flush)
        used = self.limits.used
        if self._shared is not None and used and time.monotonic() - used < _SHARE_SECONDS:
            counts = self.limits.told(time.time())
            try:
                heard = await asyncio.to_thread(self._shared.exchange, dict(counts), _periods())
            except OSError as error:
                if self._shared_ok:
                    logger.warning("limits of keys count at this router only: %s", error)
                self._shared_ok = False
            else:
                self._shared_ok = True
                self.limits.hear(heard, time.time())


def _periods() -> tuple[str, str]:
    at = time.time()
    return period_of("day", at), period_of("month", at)
