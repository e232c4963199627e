"""The routes under /v1/messages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.api.agents.answer import ItemAnswer, Naming, new_number
from deployments.api.agents.messages_request import messages_request
from deployments.api.agents.messages_writer import MessagesWriter, error_body
from deployments.api.agents.turn import Turn
from deployments.api.generation.answer.event_ids import EventIds
from deployments.api.generation.openai_request import OpenAIRequest, chat_call
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.backend import RecalledChoice
from engine.errors import MantaError

if TYPE_CHECKING:
    from deployments.api.app import Api

__all__ = ["PATH", "MessagesTurn", "count", "create", "error_body"]

PATH = "/v1/messages"


class MessagesTurn(Turn):
    def __init__(self, *, strict: bool, counts: bool = False) -> None:
        super().__init__()
        self._strict, self._counts = strict, counts

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        request = messages_request(body, strict=self._strict, counts=self._counts)
        self.ignored, self.names = request.ignored, request.names
        return request.chat

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        number, _ = new_number(ids)
        return ItemAnswer(call, MessagesWriter(call, Naming.of(call, number)), ids=ids, past=past)


async def create(api: "Api", exchange: HttpExchange) -> None:
    await api.generate(exchange, chat=True, turn=MessagesTurn(strict=api.options.strict))


async def count(api: "Api", exchange: HttpExchange) -> None:
    """Tokens of the prompt that a request would have: clients compact by it."""
    body = await api.read(exchange)
    turn = MessagesTurn(strict=api.options.strict, counts=True)
    chat = await in_thread(lambda: turn.chat(body), exchange.body_size)
    try:
        call = await chat_call(chat, exchange.body_size, api.backend, api.options, exchange.caller)
    except (ApiError, MantaError) as error:
        raise turn.error(error) from None
    exchange.ignored += turn.ignored
    await exchange.answer(200, msgspec.json.encode({"input_tokens": len(call.prompts[0])}))
