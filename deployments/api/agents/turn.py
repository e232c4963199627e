"""Turn: one request of an API that is read into a chat and answered in items."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from deployments.api.agents.answer import ItemAnswer
from deployments.api.agents.renaming import Renaming
from deployments.api.generation.answer.event_ids import EventIds
from deployments.api.generation.openai_request import OpenAIRequest
from deployments.api.http.errors import ApiError, from_backend
from deployments.api.http.exchange import HttpExchange
from deployments.backend import Generation, RecalledChoice
from engine.errors import MantaError
from engine.text.infill import Gap


class Turn(ABC):
    """One request that is read into a chat and answered in items.

    ignored: the fields without effect, once the body was read
    names: the names of the chat's fields in the request, once the body was read
    is_chat: whether the body was read into a chat, and not into a completion
    gap: the gap that the completion fills, where its body does not name one
    """

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self.names: Renaming | None = None
        self.is_chat = True
        self.gap: Gap | None = None

    @abstractmethod
    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the chat, and set `names`. Raises ApiError.

        A large body is read in a thread.
        """

    async def admit(self, exchange: HttpExchange) -> None:
        """Check what has to be allowed before the request is queued. Raises ApiError."""
        return

    async def settle(self, exchange: HttpExchange) -> bool:
        """Whether the request needed no generation, and has been answered."""
        return False

    @abstractmethod
    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer: ...

    async def detach(
        self, exchange: HttpExchange, answer: ItemAnswer, generation: Generation
    ) -> bool:
        """Whether the answer continues without the connection, which has been answered then."""
        return False

    def name(self, path: str) -> str:
        """Return the request's name of a chat field."""
        return path if self.names is None else self.names.name(path)

    def error(self, error: ApiError | MantaError) -> ApiError:
        """Return the error with the names of the request's own fields."""
        if self.names is not None:
            return self.names.error(error)
        return error if isinstance(error, ApiError) else from_backend(error)
