"""Turn: one request of an API that is read into a chat and answered in items."""

from collections.abc import Sequence
from typing import Any, Protocol

from deployments.api.agents.answer import ItemAnswer
from deployments.api.errors import ApiError
from deployments.api.generation.event_ids import EventIds
from deployments.api.generation.openai_request import OpenAIRequest
from deployments.backend import RecalledChoice
from engine.errors import MantaError


class Turn(Protocol):
    ignored: list[str]  # fields without effect, once the body was read

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of the chat; in a thread if it is large. Raises ApiError."""
        ...

    def name(self, path: str) -> str:
        """Of a field of the chat, in the request."""
        ...

    def error(self, error: ApiError | MantaError) -> ApiError:
        """About the request's own fields."""
        ...

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer: ...
