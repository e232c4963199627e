"""KeyKeeper: a router's work for keys and usage beside its requests. It reads the keys files again,
shares counts with the other routers, and writes the usage file. One look a second, in a thread."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from deployments.api.key_limits import KeyLimits, period_of
from deployments.observe.metrics import RouterMetrics
from deployments.router.inflight import InflightRequest
from deployments.router.keys.key_files import KeyFiles, KeySettings
from deployments.router.keys.sharing import SharedCounts
from deployments.router.keys.usage_log import UsageLine, UsageLog

logger = logging.getLogger("manta.router")

LOOK_SECONDS = 1.0
_SHARE_SECONDS = 60.0  # after the last request of a key with limits


class KeyKeeper:
    """The keys and usage of one router.

    on_change(options): called with the fields of ApiOptions that follow from changed keys.
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
        self._told = True  # whether the store answered the last time
        self._task: asyncio.Task[None] | None = None
        self._names = self._files.names()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to look at: neither keys nor a usage file."""
        return not self._keyed and self._log is None

    async def start(self) -> dict[str, Any]:
        """Start the looks, and return the fields of ApiOptions that follow from the keys as they
        are now."""
        if not self.idle:
            await asyncio.to_thread(self._first)
            self._names = self._files.names()
            self._task = asyncio.get_running_loop().create_task(self._watch())
        return self._files.options()

    def close(self) -> None:
        """Stop the looks, and write the usage of prompts that have ended until now."""
        if self._task is not None:
            self._task.cancel()
        if self._log is not None:
            self._log.flush()

    def ended(self, inflight: InflightRequest) -> None:
        """Count a prompt that has ended for its key and model."""
        trace = inflight.trace
        # A resumed stream has another router's tokens in front, which were counted there.
        before = sum(len(tokens or ()) for tokens in inflight.request.emitted)
        prompt = 0 if inflight.request.emitted else trace.prompt_tokens
        output = max(0, trace.output_tokens - before)
        at = time.time()
        name = ""
        if trace.owner:
            name = self._names.get(trace.owner, trace.owner[:8])
            self._metrics.key_requests.add(1, name, trace.model)
            self._metrics.key_prompt_tokens.add(prompt, name, trace.model)
            self._metrics.key_output_tokens.add(output, name, trace.model)
            self.limits.ended(trace.owner, prompt, output, at)
        if self._log is not None:
            self._log.add(
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
        self._files.look()
        if self._shared is None:
            return
        with contextlib.suppress(OSError):
            if self._log is not None:
                self._shared.base(self._log.spent(time.time()))
            self.limits.hear(self._shared.exchange({}, _periods()), time.time())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except Exception:
                logger.exception("the look at keys and usage failed")

    async def look(self) -> None:
        """Read changed keys, write the usage file and share counts with the other routers."""
        if await asyncio.to_thread(self._files.look):
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
                if self._told:
                    logger.warning("limits of keys count at this router only: %s", error)
                self._told = False
            else:
                self._told = True
                self.limits.hear(heard, time.time())


def _periods() -> tuple[str, str]:
    at = time.time()
    return period_of("day", at), period_of("month", at)
