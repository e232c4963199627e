"""AllRouters: calls to all routers of an application, through Serve."""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

logger = logging.getLogger("manta.router")


class AllRouters:
    """Calls of one router to all routers of its application, including itself."""

    def __init__(self, deployment: str, app: str) -> None:
        self._deployment, self._app = deployment, app
        self._handle: Any = None

    async def ask(self, seconds: float, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all routers, and return the answers that arrive within `seconds`.

        The answer of a router that is late or fails is missing from the list.
        """
        try:
            async with asyncio.timeout(seconds) as limit:
                if self._handle is None:
                    self._handle = serve.get_deployment_handle(self._deployment, self._app)
                # Serve's results_async() would lose all answers if one were late.
                asked = self._handle.broadcast(method, *arguments)
                waiting = [
                    asyncio.ensure_future(result.get_async())
                    for result in await asked._fetch_replica_results_async()
                ]
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the other routers cannot be asked: %s", type(error).__name__)
            return []
        seconds_left = (limit.when() or 0.0) - asyncio.get_running_loop().time()
        done, late = await asyncio.wait(waiting, timeout=max(0.0, seconds_left))
        for task in late:
            task.cancel()
        return [task.result() for task in done if task.exception() is None]
