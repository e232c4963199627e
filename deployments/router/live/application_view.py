"""ApplicationView: what all routers of an application know, whichever of them is asked."""

from collections.abc import Awaitable, Callable
from typing import Any

from deployments.observe.figures import SingleFlight


class ApplicationView:
    """own: this router's view. others: asks all routers for theirs; those that do not answer are
    missing. However many look, there is one question to the others at a time."""

    def __init__(
        self,
        own: Callable[[], dict[str, Any]],
        others: Callable[[], Awaitable[list[dict[str, Any]]]],
    ) -> None:
        self._own = own
        self._others = others
        self.routers = SingleFlight(self._gather)

    async def _gather(self) -> list[dict[str, Any]]:
        """One for each router, by name."""
        told = {view["router"]: view for view in await self._others()}
        own = self._own()
        return sorted([*(told | {own["router"]: own}).values()], key=lambda view: view["router"])
