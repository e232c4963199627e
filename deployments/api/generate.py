"""generate: handles one generation request, from its body to the end of its answer, in any
dialect."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from deployments.api.context import ApiContext, Handler
from deployments.api.generation.call import GenerationCall, check_limits, prepare
from deployments.api.generation.images import ChatImages, read_images
from deployments.api.generation.request import ChatRequest, ImagePart, TextRequest
from deployments.api.generation.tenancy import SESSION_HEADER, queue_place, session_digest
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.http.json_body import in_thread
from deployments.api.output.grammars import grammar_of, output_grammar_of
from deployments.api.served_model import find_model
from deployments.api.stream.event_ids import EventIds, event_ids
from deployments.api.stream.merge import start
from deployments.api.stream.replay import Resumption, recall
from deployments.backend import Generation, ModelCard, RecalledChoice
from deployments.images.intake import ImageIntake
from engine.errors import MantaError

_SESSION = SESSION_HEADER.encode()


class Answer(Protocol):
    """The writer of the answer to a generation call, in the format of one dialect."""

    async def stream(
        self, generation: Generation, exchange: HttpExchange, keepalive: float
    ) -> None: ...

    async def collect(self, generation: Generation) -> bytes: ...


class DialectRequest(ABC):
    """A generation request in the dialect of one API.

    names_model_first: whether an unknown model is reported before other errors of the body
    """

    names_model_first = False

    @abstractmethod
    def read(
        self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]
    ) -> ChatRequest | TextRequest | None:
        """Convert a body into a request; None if the body asks for no generated text.

        ignored: the list that names of fields without effect are added to

        Called in a thread for large bodies. Raises ApiError naming the body's fields.
        """

    async def admit(self, context: ApiContext, exchange: HttpExchange) -> None:
        """Check a request against conditions of this dialect; the base class has none.

        Raises ApiError.
        """
        return

    async def settle(self, context: ApiContext, exchange: HttpExchange) -> None:
        """Answer a request that asks for no generated text. Raises ApiError, MantaError."""
        raise NotImplementedError

    @abstractmethod
    def answer(self, call: GenerationCall, resumed: Resumption) -> Answer: ...

    async def detach(
        self, context: ApiContext, exchange: HttpExchange, generation: Generation
    ) -> bool:
        """Continue a generation in the background, if the request asks for it.

        Returns whether the request asked for it; if so, the exchange has been answered.
        """
        return False


async def generate(
    context: ApiContext, exchange: HttpExchange, new_request: Callable[[], DialectRequest]
) -> None:
    """Answer a generation request. new_request: returns a new DialectRequest. Raises ApiError,
    MantaError."""
    dialect = new_request()
    context.count_request(exchange)
    # Admit the request only after reading its body: a slow body must not occupy a place in the
    # queue.
    body = await context.read(exchange)
    ids = event_ids(exchange, exchange.caller.id, context.options.event_secret)
    ignored: list[str] = []
    try:
        read = partial(dialect.read, context, body, ignored)
        request = await in_thread(read, exchange.body_size)
    except ApiError:
        if dialect.names_model_first:
            await find_model(body.get("model"), context.backend, exchange.caller)
        raise
    await dialect.admit(context, exchange)
    exchange.ignored += ignored
    if request is None:
        await dialect.settle(context, exchange)
        return
    backend, options = context.backend, context.options
    place = queue_place(exchange, request.queue, options)
    context.counter.in_flight += 1
    undecoded: ChatImages | None = None
    try:
        card = await context.admit(place, request.model, exchange.caller)
        images = undecoded = await _images(request, card, options.images, exchange.ignored)
        if images is not None:
            images.check_sizes(card.image_tokens)
        call = await prepare(request, exchange.body_size, card, backend, images)
        exchange.ignored += call.ignored
        if call.card.parent is not None:
            call.common.adapter = await context.pin(call.card.id, place.deadline)
            call.card = backend.models().get(call.card.id, call.card)
        check_limits(call, options.max_choices, options.max_tokens)
        if call.output is not None and call.output.needs_grammar(request.constraint):
            grammar, unused = await output_grammar_of(call.output, request.constraint, call.card)
            call.change_params(structured=grammar, thinking=call.output.thinking_budget)
            exchange.ignored += unused
        elif request.constraint is not None:
            grammar, unused = await grammar_of(request.constraint, call.tokenizer, call.card)
            call.change_params(structured=grammar)
            exchange.ignored += unused
        context.charge(exchange, call.prompts)
        common = call.common
        if images is not None:
            common.images = await options.images.pixels(
                images.placed, images.processor, images.held, copies=common.params.n
            )
            undecoded = None  # images count against the memory limit while they are referenced
        common.request_id, common.owner = exchange.request_id, exchange.caller.id
        common.key, common.deadline = place.key, place.deadline
        common.priority, common.cache_salt = place.priority, place.cache_salt
        common.trace = exchange.trace
        if sessions := exchange.headers.get(_SESSION):
            common.session = session_digest(exchange.caller.id, sessions[0])
        # The router reads the output only once all choices have ended, unless it streams the answer
        # or may end a choice itself: by a stop string, or by the parser.
        common.whole = not (request.stream or common.params.stop or call.output)
        call.timing = exchange.headers.get(b"x-return-timing") == [b"1"]
        await _answer(context, exchange, call, ids if request.stream else None, dialect)
    except (ApiError, MantaError) as error:
        raise request.own_error(error) from None
    finally:
        context.counter.in_flight -= 1
        if undecoded is not None:
            undecoded.held.release()


async def _images(
    request: ChatRequest | TextRequest, card: ModelCard, intake: ImageIntake, ignored: list[str]
) -> ChatImages | None:
    """Return the images of a chat after reading their headers; None for a request without
    images."""
    if isinstance(request, TextRequest):
        return None
    for message in request.messages:
        for part in message.content or ():
            if type(part) is ImagePart:
                return await read_images(request.messages, card, intake, ignored)
    return None


def answers(dialect: Callable[[], DialectRequest]) -> Handler:
    """Return the handler of a generating route. dialect: returns a new DialectRequest."""
    return partial(generate, new_request=dialect)


def generates(handler: Handler) -> bool:
    """Return whether a route's handler was created by `answers`."""
    return isinstance(handler, partial) and handler.func is generate


async def _answer(
    context: ApiContext,
    exchange: HttpExchange,
    call: GenerationCall,
    ids: EventIds | None,
    dialect: DialectRequest,
) -> None:
    past: list[RecalledChoice | None] = []
    if ids is not None:
        ids.bind(call)
        if ids.resumed:
            past = await recall(call, ids, context.backend)
    answer = dialect.answer(call, Resumption(ids, past))
    generation = start(call, context.backend)
    if await dialect.detach(context, exchange, generation):
        return
    async with UntilDisconnect(exchange.receive, generation.abort):
        if call.request.stream:
            await answer.stream(generation, exchange, context.options.keepalive_s)
            return
        body = await answer.collect(generation)
    await exchange.answer(200, body)


async def count_prompt(context: ApiContext, exchange: HttpExchange, dialect: DialectRequest) -> int:
    """Return the number of tokens of a request's prompt, without generating. Raises ApiError."""
    body = await context.read(exchange)
    ignored: list[str] = []
    read = partial(dialect.read, context, body, ignored)
    request = await in_thread(read, exchange.body_size)
    assert request is not None
    exchange.ignored += ignored
    backend, options = context.backend, context.options
    try:
        card = await find_model(request.model, backend, exchange.caller)
        images = await _images(request, card, options.images, exchange.ignored)
        if images is not None:
            exchange.on_end.append(images.held.release)
        call = await prepare(request, exchange.body_size, card, backend, images)
    except (ApiError, MantaError) as error:
        raise request.own_error(error) from None
    return len(call.prompts[0])
