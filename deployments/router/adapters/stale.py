"""StaleAdapters: requests that were sent with an adapter's old revision, because their router had
not heard of the new one. They have no token yet, so they begin again with the new revision."""

import asyncio
import time
from collections.abc import Callable

from deployments.adapters.paths import without_paths
from deployments.adapters.registry import AdapterRegistry
from deployments.router.inflight import InflightChoice, InflightRequest
from engine.errors import MantaError
from engine.messages import Delta

_STALE = ("adapter_changed", "adapter_not_found")
_PAUSE = 0.3  # seconds: the replica may know of a change before the record store does


class StaleAdapters:
    """place(choices): places choices anew, as their request says now."""

    def __init__(
        self, adapters: AdapterRegistry, place: Callable[[list[InflightChoice]], None]
    ) -> None:
        self._adapters = adapters
        self._place = place
        self._ended: dict[InflightRequest, list[tuple[InflightChoice, Delta]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def takes(self, choice: InflightChoice, delta: Delta) -> bool:
        """Whether this end of a choice is kept back. If not, its error may be shown to the
        client."""
        inflight, request = choice.inflight, choice.inflight.request
        if request.adapter is None:
            return False
        ended = self._ended.get(inflight)
        if ended is not None:
            ended.append((choice, delta))
            return True
        code = delta.error.partition(":")[0]
        if code not in _STALE or inflight.begun or not request.adapter.version:
            delta.error = without_paths(delta.error, request.adapter.path, request.model)
            return False
        self._ended[inflight] = [(choice, delta)]
        task = asyncio.get_running_loop().create_task(self._look(inflight))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _look(self, inflight: InflightRequest) -> None:
        request = inflight.request
        pinned = request.adapter
        assert pinned is not None
        try:
            for pause in (0.0, _PAUSE):
                await asyncio.sleep(pause)
                await self._adapters.refresh()
                record = await self._adapters.pin(pinned.name)
                if record.key != pinned.key or record.version > pinned.version:
                    break
        except MantaError as error:
            del self._ended[inflight]
            inflight.fail(error)
            return
        ended = self._ended.pop(inflight)
        if record.key == pinned.key and record.version <= pinned.version:
            for choice, delta in ended:
                if not choice.done:
                    delta.error = without_paths(delta.error, pinned.path, request.model)
                    inflight.take(choice, delta, time.monotonic())
            return
        request.adapter = record
        choices = [choice for choice in inflight.choices if not choice.done]
        if choices:
            self._place(choices)
