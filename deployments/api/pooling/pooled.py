"""PooledCall: an HTTP request for embeddings or scores of texts.

Each text becomes a separate request to the engines, so that one step can mix texts of several
clients and other requests. A bounded number of a call's texts runs at a time, so that long lists do
not delay other work.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from deployments.adapters.record_store import AdapterRecord
from deployments.api.body_fields import kept_tokens, take_token_ids
from deployments.api.context import ApiContext
from deployments.api.fields.body import StructBody
from deployments.api.fields.pooled import Inputs, PoolingBody, PoolingOptions, TextInput
from deployments.api.generation.call import chat_ids, template_options, too_many_tokens
from deployments.api.generation.images import check_no_images
from deployments.api.generation.messages import check_messages
from deployments.api.generation.tenancy import (
    QueueFields,
    QueuePlace,
    engine_request,
    queue_place,
    take_queue,
)
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.http.json_body import in_thread
from deployments.api.stream.merge import failed
from deployments.backend import Backend, Generation, GenerationRequest, ModelCard
from engine.errors import Overloaded, context_too_long, no_vectors
from engine.pooling import Pooling, Vector, as_array, normalized
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer, TooManyTokens

FIRST_WINDOW = 16  # initial number of a call's texts in flight; each finished text raises it by one
MAX_WINDOW = 256

_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")

T = TypeVar("T", bound=PoolingBody)
In = TypeVar("In", bound=Inputs)
NameModel = Callable[[str | None, Backend], str | None]

_POOLED = SamplingParams(max_tokens=0, temperature=0.0, pooled=True)
_UNSCALED = SamplingParams(max_tokens=0, temperature=0.0, pooled=True, unscaled=True)


@dataclass(slots=True)
class PooledCall(Generic[T]):
    """A checked HTTP request for embeddings, or for the scores of a classifier.

    limit: the maximum number of tokens of a text
    truncate: whether longer texts are truncated, at their end
    keep_end: whether longer texts are truncated at their beginning instead
    special: whether the special tokens that tokenizer.json defines are added to a text
    activation: whether the final sigmoid, softmax or normalisation is applied; None: the model's
        default
    """

    context: ApiContext
    exchange: HttpExchange
    body: T
    card: ModelCard
    pooling: Pooling
    tokenizer: Tokenizer
    limit: int
    truncate: bool
    special: bool
    place: QueuePlace
    adapter: AdapterRecord | None
    keep_end: bool = False
    activation: bool | None = None

    @property
    def raw(self) -> bool:
        return self.activation is False

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the model's classification head. Raises ApiError 400 if the model has
        none."""
        if not self.pooling.labels:
            message = "this model classifies nothing: its head has no labels"
            raise invalid(message, "model", "classify_not_supported")
        return self.pooling.labels

    def check_vectors(self, size: int | None, name: str = "dimensions") -> None:
        """Check that the model computes embeddings, and of this size. Raises InvalidRequest.

        size: number of elements; None: the model's
        name: the request's field of the size, for errors
        """
        if self.pooling.labels:
            raise no_vectors()
        if size is not None:
            self.pooling.check_dimensions(size, self.card.vector_size, name)

    def vector(self, found: bytes, dimensions: int | None = None) -> Vector:
        """Convert a result of `vectors` into an embedding, cut and normalised as requested.

        found: a result of `vectors`
        dimensions: the number of elements; None: the model's
        """
        values = as_array(found)
        if dimensions is not None:
            values = values[:dimensions] if self.raw else self.pooling.cut(values, dimensions)
        return normalized(values) if self.activation else values

    def encode(self, text: str, path: str, most: int | None = None) -> list[int]:
        """Return the token ids of a text. Raises InvalidRequest context_length_exceeded.

        path: the text's path in the request, for errors
        most: a maximum number of tokens, to which longer texts are truncated; None: no maximum
        """
        tokenizer = self.tokenizer
        most_kept = self.limit if most is None else min(self.limit, most)
        if self.truncate or most_kept == most:
            return tokenizer.encode(
                text, add_special_tokens=self.special, max_tokens=most_kept, keep_end=self.keep_end
            )
        self._check_length(text, path)
        return self.checked(tokenizer.encode(text, add_special_tokens=self.special), path)

    def _check_length(self, text: str, path: str) -> None:
        try:
            self.tokenizer.check_length(text, self.limit)
        except TooManyTokens as error:
            raise too_many_tokens(error, path) from None

    def encode_pair(self, first: str, second: str, path: str, most: int | None = None) -> list[int]:
        """Return the token ids of a pair of texts, combined as tokenizer.json defines.

        If a pair is too long and `truncate` is set, the second text is truncated.

        path: the second text's path in the request, for errors
        most: a maximum number of tokens, to which the second text is truncated; None: no maximum

        Raises InvalidRequest context_length_exceeded.
        """
        if not self.truncate:
            self._check_length(first, path)
            self._check_length(second, path)
        ids, cuttable = self.tokenizer.encode_pair(
            first,
            second,
            add_special_tokens=self.special,
            max_tokens=self.limit,
            keep_end=self.keep_end,
        )
        over = max(0, len(ids) - self.limit)
        if over and (not self.truncate or over >= len(cuttable)):
            raise context_too_long(self.limit, len(ids), param=path, where=path)
        most_kept = len(cuttable) - over
        most_kept = most_kept if most is None else min(most_kept, most)
        dropped = set(
            cuttable[: len(cuttable) - most_kept] if self.keep_end else cuttable[most_kept:]
        )
        return [token for place, token in enumerate(ids) if place not in dropped]

    def checked(self, ids: list[int], path: str) -> list[int]:
        if self.truncate:
            return ids[-self.limit :] if self.keep_end else ids[: self.limit]
        if len(ids) > self.limit:
            raise context_too_long(self.limit, len(ids), param=path, where=path)
        return ids

    def listed(self, data: list[Any], tokens: int) -> bytes:
        """Return the JSON answer of a route with a list of results. tokens: number of computed
        tokens."""
        answer = {
            "id": self.exchange.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.card.id,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return msgspec.json.encode(answer)

    async def vectors(self, prompts: Sequence[list[int]]) -> list[bytes]:
        """Return the embedding or the classifier's scores of each prompt, as little-endian float32
        bytes.

        Each prompt must have at least one token. Raises ApiError, MantaError, ClientDisconnected.
        """
        self.context.charge(self.exchange, prompts)
        params = _UNSCALED if self.raw and not self.pooling.labels else _POOLED
        whose = self.exchange, self.place, self.card.id
        requests = [engine_request(*whose, ids, params, self.adapter) for ids in prompts]
        run = _Run(self.context.backend, requests)
        async with UntilDisconnect(self.exchange.receive, run.abort):
            return await run.collect()


@asynccontextmanager
async def pooled_call(
    context: ApiContext,
    exchange: HttpExchange,
    fields: StructBody[T],
    name_model: NameModel = lambda name, _: name,
) -> AsyncIterator[PooledCall[T]]:
    """A context manager that reads a pooling request as a PooledCall, which counts as in flight
    until the block ends.

    fields: the definition of the route's body
    name_model: returns the served model for the name in the request's body

    Raises ApiError, MantaError.
    """
    context.count_request(exchange)
    body = await context.read_as(exchange, fields)
    context.counter.in_flight += 1
    try:
        queue = take_queue(body, (await context.read(exchange)).get("user"))
        model = name_model(body.model, context.backend)
        yield await _admitted(context, exchange, body, queue, model)
    finally:
        context.counter.in_flight -= 1


async def _admitted(
    context: ApiContext, exchange: HttpExchange, body: T, queue: QueueFields, model: str | None
) -> PooledCall[T]:
    """Return the PooledCall of a body, after the checks that all pooling routes share."""
    place = queue_place(exchange, queue, context.options)
    card = await context.admit(place, model, exchange.caller)
    if card.pooling is None:
        raise no_vectors()
    adapter = None
    if card.parent is not None:
        adapter = await context.pin(card.id, place.deadline)
        card = context.backend.models().get(card.id, card)
    assert card.pooling is not None
    limit = min(card.max_model_len, card.pooling.max_tokens or card.max_model_len)
    wanted = body.pooling_options()
    cut = kept_tokens(wanted.cut, limit)
    return PooledCall(
        context,
        exchange,
        body,
        card,
        card.pooling,
        context.backend.tokenizer(card.id),
        limit if cut is None else cut,
        wanted.truncate or cut is not None,
        wanted.special,
        place,
        adapter,
        wanted.keep_end,
        _activation(wanted),
    )


def _activation(wanted: PoolingOptions) -> bool | None:
    """Return the value of the fields in ACTIVATION, which are synonyms; None: none is set.

    Raises ApiError 400 if two of them differ.
    """
    names = wanted.activations
    if len(set(names.values())) > 1:
        raise invalid(f"{' and '.join(names)} disagree", next(iter(names)), "conflicting_fields")
    return next(iter(names.values()), None)


async def take_input(call: PooledCall[In]) -> list[list[int]]:
    """Return the token ids of each text of `input`, or of the one text rendered from `messages`.

    Raises ApiError, InvalidRequest.
    """
    body = call.body
    template = template_options(
        call.context.options,
        body.chat_template_kwargs,
        # By default the prompt does not end with the start of the assistant's turn.
        opens=bool(body.add_generation_prompt),
        continues=body.continue_final_message,
    )
    messages = body.messages
    if messages is None:
        call.exchange.ignored += (name for name in _TEMPLATE if getattr(body, name) is not None)
        return await take_prompts(call, body.input, "input", body.prompt_name)
    for name in ("input", "prompt_name"):
        if getattr(body, name) is not None:
            raise invalid(
                f"messages and {name} exclude each other", "messages", "conflicting_fields"
            )
    if body.add_special_tokens:
        raise invalid(
            "add_special_tokens: the chat template writes those of messages",
            "add_special_tokens",
            "conflicting_fields",
        )
    ignored = call.exchange.ignored

    def work() -> list[int]:
        chat = check_messages(messages, (call.exchange.parsed or {})["messages"], ignored)
        check_no_images(chat, call.card)
        most = sys.maxsize if call.truncate else call.limit
        ids = chat_ids(call.tokenizer, chat, None, template, None, ignored, most)
        return call.checked(ids, "messages")

    try:
        ids = await in_thread(work, call.exchange.body_size)
    except TooManyTokens as error:
        raise too_many_tokens(error, "messages") from None
    if not ids:
        raise invalid("the messages render to an empty text", "messages")
    return [ids]


async def take_prompts(
    call: PooledCall[T], texts: TextInput | None, name: str, prompt_name: str | None = None
) -> list[list[int]]:
    """Return the token ids of each text.

    name: the field of the texts
    prompt_name: the name of the checkpoint's prompt that is put before each text

    Raises ApiError, InvalidRequest.
    """
    before = call.pooling.prompt(prompt_name) if prompt_name else ""
    if texts is None:
        raise invalid(f"{name} is required", name, "missing_field")
    if before and isinstance(texts.items[0], list):
        raise invalid("prompt_name goes before texts, not token ids", "prompt_name")

    def work() -> list[list[int]]:
        paths = (f"{name}[{i}]" if texts.many else name for i in range(len(texts.items)))
        return [_encoded(call, *pair, before) for pair in zip(texts.items, paths, strict=True)]

    return await in_thread(work, call.exchange.body_size)


def _encoded(call: PooledCall[T], text: str | list[Any], path: str, before: str) -> list[int]:
    if isinstance(text, str):
        ids = call.encode(before + text, path)
    elif text:
        ids = call.checked(take_token_ids(text, path, call.card.vocab_size), path)
    else:
        ids = []
    if not ids:
        raise invalid(f"{path} must not be empty", path)
    return ids


class _Run:
    """The run of a call's texts as engine requests, with a bounded number in flight."""

    def __init__(self, backend: Backend, requests: Sequence[GenerationRequest]) -> None:
        self._backend = backend
        self._waiting = deque(enumerate(requests))
        self._found: list[bytes] = [b""] * len(requests)
        self._live: dict[asyncio.Task[bytes], tuple[int, Generation]] = {}
        self._window = FIRST_WINDOW

    async def collect(self) -> list[bytes]:
        while self._waiting or self._live:
            self._fill()
            done, _ = await asyncio.wait(self._live, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, _ = self._live.pop(task)
                self._found[index] = task.result()
            self._window = min(MAX_WINDOW, self._window + len(done))
        return self._found

    def _fill(self) -> None:
        """Start waiting requests up to the window's size, which shrinks if the backend refuses a
        request."""
        while self._waiting and len(self._live) < self._window:
            index, request = self._waiting[0]
            try:
                generation = self._backend.generate(request)
            except Overloaded as refusal:
                if not self._live or refusal.code == "draining":
                    raise
                self._window = max(1, len(self._live) // 2)
                return
            self._waiting.popleft()
            self._live[asyncio.create_task(_vector(generation))] = (index, generation)

    def abort(self) -> None:
        self._waiting.clear()
        for task, (_, generation) in self._live.items():
            if not task.cancel() and not task.cancelled():
                # The exception is retrieved so that asyncio does not log it; only the first failure
                # is reported.
                task.exception()
            generation.abort()


async def _vector(generation: Generation) -> bytes:
    while items := await generation.next():
        for _, delta in items:
            if delta.finish:
                if delta.vector is None:
                    raise failed(delta)
                return delta.vector
    raise AssertionError("a text ended without a word")
