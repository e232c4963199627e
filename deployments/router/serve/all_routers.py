"""AllRouters: calls to all routers of an application, through Serve."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

logger = logging.getLogger("manta.router")


class AllRouters:
    """Calls of one router to all routers of its application, including itself.

    deployments: names of the Serve deployments of the application's routers.
    """

    def __init__(self, deployments: Sequence[str], app: str) -> None:
        self._deployments, self._app = deployments, app
        self._handles: dict[str, Any] = {}

    async def ask(self, seconds: float, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all routers, and return the answers that arrive within `seconds`.

        The answer of a router that is late or fails is missing from the list.
        """
        calls = (self._ask(name, seconds, method, *arguments) for name in self._deployments)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def _ask(self, name: str, seconds: float, method: str, *arguments: Any) -> list[Any]:
        """Return the answers of the routers of one deployment."""
        try:
            async with asyncio.timeout(seconds) as limit:
                if name not in self._handles:
                    # A missing deployment is a late one: an update may have removed it.
                    self._handles[name] = serve.get_deployment_handle(
                        name, self._app, _check_exists=False
                    )
                # Serve's results_async() would lose all answers if one were late.
                asked = self._handles[name].broadcast(method, *arguments)
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
