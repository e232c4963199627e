"""PooledCall: an HTTP request for vectors of texts.

Each text goes to the engines as a request of its own, so that a step takes texts of any clients
beside what else it computes. A bounded number of them runs at a time, so that a long list takes
turns with other work.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from deployments.adapters.record_store import AdapterRecord
from deployments.api.body_fields import (
    check_names,
    name_fields,
    take_bool,
    take_cut,
    take_str,
    take_token_ids,
    take_word,
)
from deployments.api.context import ApiContext
from deployments.api.fields.generation import SIDES, TEMPLATE
from deployments.api.fields.pooled import (
    ACTIVATION,
    MAX_PROMPT_NAME,
    MAX_TEXTS,
)
from deployments.api.fields.schema import Body
from deployments.api.generation.call import (
    chat_ids,
    template_options,
    too_many_tokens,
)
from deployments.api.generation.messages import check_messages
from deployments.api.generation.tenancy import allowed_priority, deadline_after, key_of, take_queue
from deployments.api.http.errors import invalid, wrong_type
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.http.off_loop import in_thread
from deployments.api.options import ApiOptions
from deployments.api.served_model import find_model, known_model
from deployments.api.stream.merge import failed
from deployments.backend import Backend, Generation, GenerationRequest, ModelCard
from engine.errors import Overloaded, context_too_long, no_vectors
from engine.messages import Delta
from engine.pooling import Pooling, Vector, as_array, normalized
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer, TooManyTokens

FIRST_WINDOW = 16  # texts of one call at the engines; one more for each that is done
MAX_WINDOW = 256

ReadBody = Callable[[dict[str, Any]], dict[str, Any]]

_POOLED = SamplingParams(max_tokens=0, temperature=0.0, pooled=True)
_UNSCALED = SamplingParams(max_tokens=0, temperature=0.0, pooled=True, unscaled=True)


@dataclass(slots=True)
class PooledCall:
    """A checked HTTP request for embeddings, or for the scores of a classifier.

    limit: the most tokens of a text
    truncate: whether longer texts are cut, at their end
    keep_end: whether longer texts are cut at their beginning instead
    special: whether a text gets the special tokens that tokenizer.json puts around it
    activation: False: values before the last sigmoid, softmax or normalisation; True: normalised
        embeddings; None: as the model has it
    """

    exchange: HttpExchange
    body: dict[str, Any]
    backend: Backend
    card: ModelCard
    pooling: Pooling
    tokenizer: Tokenizer
    limit: int
    truncate: bool
    special: bool
    key: str
    priority: int
    deadline: float | None
    adapter: AdapterRecord | None
    charge: Callable[[Sequence[list[int]]], None]
    options: ApiOptions
    keep_end: bool = False
    activation: bool | None = None

    @property
    def raw(self) -> bool:
        return self.activation is False

    def vector(self, found: bytes, dimensions: int | None = None) -> Vector:
        """Return one of the results of `vectors` in the form that the request wants."""
        values = as_array(found)
        if dimensions is not None:
            values = values[:dimensions] if self.raw else self.pooling.cut(values, dimensions)
        return normalized(values) if self.activation else values

    def encode(self, text: str, path: str, most: int | None = None) -> list[int]:
        """Return the token ids of a text. Raises InvalidRequest context_length_exceeded.

        most: the most tokens that are kept
        """
        tokenizer = self.tokenizer
        kept = self.limit if most is None else min(self.limit, most)
        if self.truncate or kept == most:
            return tokenizer.encode(
                text, add_special_tokens=self.special, max_tokens=kept, keep_end=self.keep_end
            )
        try:
            tokenizer.check_length(text, self.limit)
        except TooManyTokens as error:
            raise too_many_tokens(error, path) from None
        return self.checked(tokenizer.encode(text, add_special_tokens=self.special), path)

    def encode_pair(self, first: str, second: str, path: str, most: int | None = None) -> list[int]:
        """Return the token ids of two texts, as tokenizer.json puts them together.

        The second text is cut where a pair is too long and `truncate` asks for it.

        most: the most tokens that are kept of the second text

        Raises InvalidRequest context_length_exceeded.
        """
        for text in (first, second):
            if not self.truncate:
                try:
                    self.tokenizer.check_length(text, self.limit)
                except TooManyTokens as error:
                    raise too_many_tokens(error, path) from None
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
        kept = len(cuttable) - over
        kept = kept if most is None else min(kept, most)
        dropped = set(cuttable[: len(cuttable) - kept] if self.keep_end else cuttable[kept:])
        return [token for place, token in enumerate(ids) if place not in dropped]

    def checked(self, ids: list[int], path: str) -> list[int]:
        if self.truncate:
            return ids[-self.limit :] if self.keep_end else ids[: self.limit]
        if len(ids) > self.limit:
            raise context_too_long(self.limit, len(ids), param=path, where=path)
        return ids

    def listed(self, data: list[Any], tokens: int) -> bytes:
        """Return the JSON answer of a route with a list of results. tokens: the computed tokens."""
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
        """Compute each prompt's embedding, or a classifier's scores: float32, little-endian.

        Each prompt has at least one token.
        Raises ApiError, MantaError, ClientDisconnected.
        """
        self.charge(prompts)
        run = _Run(self.backend, [self._request(ids) for ids in prompts])
        async with UntilDisconnect(self.exchange.receive, run.abort):
            return await run.collect()

    def _request(self, ids: list[int]) -> GenerationRequest:
        return GenerationRequest(
            request_id=self.exchange.request_id,
            model=self.card.id,
            token_ids=ids,
            params=_UNSCALED if self.raw and not self.pooling.labels else _POOLED,
            seed=0,
            adapter=self.adapter,
            priority=self.priority,
            deadline=self.deadline,
            key=self.key,
            owner=self.exchange.caller.id,
            trace=self.exchange.trace,
        )


@asynccontextmanager
async def pooled_call(
    context: ApiContext, exchange: HttpExchange, fields: Body, read: ReadBody | None = None
) -> AsyncIterator[PooledCall]:
    """Read the request, and count it as in flight until the block ends.

    fields: the fields of this route
    read: the conversion of the route's body into one with the field names of all routes

    Raises ApiError, MantaError.
    """
    context.check_room()  # a request that is refused for it is not counted
    context.count_request(exchange)
    body = await context.read(exchange)
    context.counter.in_flight += 1
    try:
        yield await _checked(context, exchange, body, fields, read)
    finally:
        context.counter.in_flight -= 1


async def _checked(
    context: ApiContext,
    exchange: HttpExchange,
    body: dict[str, Any],
    fields: Body,
    read: ReadBody | None,
) -> PooledCall:
    """Return the call of a body, after the checks of the fields that all routes have."""
    exchange.ignored += check_names(body, fields.known, strict=context.options.strict)
    if read is not None:
        body = read(body)
    queue = take_queue(body)
    key = key_of(exchange, queue.user, context.options)
    deadline = deadline_after(exchange, queue.deadline, context.options)
    priority = allowed_priority(exchange, queue.priority)
    context.backend.admit(key, known_model(body.get("model"), context.backend))
    card = await find_model(body.get("model"), context.backend, exchange.caller)
    if card.pooling is None:
        raise no_vectors()
    adapter = None
    if card.parent is not None:
        adapter = await context.pin(card.id, deadline)
        card = context.backend.models().get(card.id, card)
    assert card.pooling is not None
    limit = min(card.max_model_len, card.pooling.max_tokens or card.max_model_len)
    cut = take_cut(body, limit)
    return PooledCall(
        exchange,
        body,
        context.backend,
        card,
        card.pooling,
        context.backend.tokenizer(card.id),
        limit if cut is None else cut,
        take_bool(body, "truncate") or cut is not None,
        take_bool(body, "add_special_tokens", True),
        key,
        priority,
        deadline,
        adapter,
        partial(context.charge, exchange),
        context.options,
        take_word(body, "truncation_side", SIDES) == "left",
        _take_activation(body, fields),
    )


def _take_activation(body: dict[str, Any], fields: Body) -> bool | None:
    asked = {
        name: take_bool(body, name)
        for name in ACTIVATION
        if name in fields.taken and body.get(name) is not None
    }
    if len(set(asked.values())) > 1:
        raise invalid(f"{' and '.join(asked)} disagree", next(iter(asked)), "conflicting_fields")
    return next(iter(asked.values()), None)


async def take_input(call: PooledCall, body: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of the texts of `input`, or of `messages` in the chat template.

    Raises ApiError, InvalidRequest.
    """
    # A text that is there has no turn behind it, unless the request says so.
    opens = take_bool(body, "add_generation_prompt")
    shape = {**body, "add_generation_prompt": opens}
    template_options(shape, call.options)
    if body.get("messages") is None:
        call.exchange.ignored += name_fields(n for n in TEMPLATE if body.get(n) is not None)
        return await take_prompts(call, body, "input")
    for name in ("input", "prompt_name"):
        if body.get(name) is not None:
            raise invalid(
                f"messages and {name} exclude each other", "messages", "conflicting_fields"
            )
    if take_bool(body, "add_special_tokens"):
        raise invalid(
            "add_special_tokens: the chat template writes those of messages",
            "add_special_tokens",
            "conflicting_fields",
        )
    ignored = call.exchange.ignored

    def work() -> list[int]:
        messages = check_messages(body["messages"], ignored)
        most = sys.maxsize if call.truncate else call.limit
        ids, _ = chat_ids(call.tokenizer, shape, messages, None, call.options, ignored, most)
        return call.checked(ids, "messages")

    try:
        ids = await in_thread(work, call.exchange.body_size)
    except TooManyTokens as error:
        raise too_many_tokens(error, "messages") from None
    if not ids:
        raise invalid("the messages render to an empty text", "messages")
    return [ids]


async def take_prompts(call: PooledCall, body: dict[str, Any], name: str) -> list[list[int]]:
    """Return the token ids of a text, of token ids, or of a list of either.

    The model's prompt of the name `prompt_name` goes before each text.

    Raises ApiError, InvalidRequest.
    """
    value = body.get(name)
    prompt_name = take_str(body, "prompt_name", MAX_PROMPT_NAME)
    before = call.pooling.prompt(prompt_name) if prompt_name else ""
    if value is None:
        raise invalid(f"{name} is required", name, "missing_field")
    if not isinstance(value, (str, list)):
        raise wrong_type(name, "a string, a list of token ids, or a list of these")
    if not value:
        raise invalid(f"{name} must not be empty", name)
    many = isinstance(value, list) and isinstance(value[0], (str, list))
    items: list[Any] = value if many else [value]  # type: ignore[assignment]
    if len(items) > MAX_TEXTS:
        raise invalid(f"{name} takes at most {MAX_TEXTS} texts, got {len(items)}", name)
    if before and isinstance(items[0], list):
        raise invalid("prompt_name goes before texts, not token ids", "prompt_name")

    def work() -> list[list[int]]:
        return [
            _take_one(call, item, type(items[0]), f"{name}[{i}]" if many else name, before)
            for i, item in enumerate(items)
        ]

    return await in_thread(work, call.exchange.body_size)


def _take_one(call: PooledCall, item: Any, kind: Any, path: str, before: str) -> list[int]:
    if type(item) is not kind:
        raise wrong_type(path, "of the same kind as the first")
    if isinstance(item, str):
        ids = call.encode(before + item, path)
    elif item:
        ids = call.checked(take_token_ids(item, path, call.card.vocab_size), path)
    else:
        ids = []
    if not ids:
        raise invalid(f"{path} must not be empty", path)
    return ids


class _Run:
    """The texts of one call, some of them in flight."""

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
        """Start texts. Where the service has no room for one, the running texts are waited for."""
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
                task.exception()  # seen: only the first failure is told
            generation.abort()


async def _vector(generation: Generation) -> bytes:
    while items := await generation.next():
        for _, delta in items:
            if delta.finish:
                return _taken(delta)
    raise AssertionError("a text ended without a word")


def _taken(delta: Delta) -> bytes:
    if delta.vector is None:
        raise failed(delta)
    return delta.vector
