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
    """ignored: fields without effect, once the body was read. names: of the chat's fields in the
    request, from then on. is_chat: False of a body that was read into a completion instead. gap:
    what that completion fills, where its body does not say it."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self.names: Renaming | None = None
        self.is_chat = True
        self.gap: Gap | None = None

    @abstractmethod
    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of the chat; in a thread if it is large. Sets names. Raises ApiError."""

    async def admit(self, exchange: HttpExchange) -> None:
        """What has to be asked for before the request is queued. Raises ApiError."""
        return

    async def settle(self, exchange: HttpExchange) -> bool:
        """Whether the request asked for nothing that is generated, and has been answered."""
        return False

    @abstractmethod
    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer: ...

    async def detach(
        self, exchange: HttpExchange, answer: ItemAnswer, generation: Generation
    ) -> bool:
        """Whether the answer goes on without the connection, which was answered then."""
        return False

    def name(self, path: str) -> str:
        """Of a field of the chat, in the request."""
        return path if self.names is None else self.names.name(path)

    def error(self, error: ApiError | MantaError) -> ApiError:
        """About the request's own fields."""
        if self.names is not None:
            return self.names.error(error)
        return error if isinstance(error, ApiError) else from_backend(error)
