"""The routes of the server liteqwen: /chat and /stream_chat_post, which become chats, and
/stop_generate."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from deployments.api.body_fields import ROLES, take_token_ids
from deployments.api.context import ApiContext
from deployments.api.fields.chat import MESSAGE, unknown_role
from deployments.api.fields.others import (
    LITEQWEN_CHAT,
    LITEQWEN_STOP,
    MAX_HISTORY,
    GenKwargs,
    LiteqwenChat,
)
from deployments.api.generate import DialectRequest, answers
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.messages import ChatBuilder
from deployments.api.generation.request import ChatRequest
from deployments.api.generation.sampling import check_length, take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange, request_id
from deployments.api.http.json_body import JsonObject
from deployments.api.output.step_parser import Event
from deployments.api.route import EVENTS, NAMES, QUEUES, READS, RouteTable
from deployments.api.stream.event_ids import LAST
from deployments.api.stream.item_answer import ItemAnswer, Usage, Wire
from deployments.api.stream.logprobs import ScoredToken
from deployments.api.stream.replay import Resumption
from deployments.backend import Generation
from engine.errors import context_too_long
from engine.messages import Delta
from engine.sampling_params import MAX_LOGPROBS

# field of gen_kwargs -> the field of SamplingParams with the same meaning
_SAME = {
    "temperature": "temperature",
    "top_p": "top_p",
    "topk": "top_k",
    "top_k": "top_k",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
}
_LIVE = ("waiting", "running")


class LiteqwenRequest(DialectRequest):
    """The dialect of /chat and /stream_chat_post: reads a request and writes its answer."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._body: LiteqwenChat | None = None
        self._kwargs = GenKwargs()

    def read(self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]) -> ChatRequest:
        fields = LITEQWEN_CHAT.read(body, ignored, strict=context.options.strict)
        kwargs = GenKwargs() if fields.gen_kwargs is None else fields.gen_kwargs
        self._body, self._kwargs = fields, kwargs
        adapter = kwargs.adapter_name
        builder = ChatBuilder(ignored)
        _add_history(builder, fields.history)
        role = "user" if fields.role is None else fields.role
        if not isinstance(role, str) or role not in ROLES:
            raise unknown_role(role, "role")
        builder.add_message(ROLES[role], "query", fields.query)
        if role == "tool":
            builder.check_answered(None, "query.tool_call_id")
        own_names = [name for name in _SAME if getattr(kwargs, name) is not None]
        sampling = take_sampling(
            kwargs, _SAME, logprobs=MAX_LOGPROBS if kwargs.return_logits else None
        )
        if kwargs.return_logits:
            # Logits are returned before sampling parameters, whatever the engine's default mode.
            values = {**sampling.values, "logprobs_mode": "raw_logprobs"}
            sampling = replace(sampling, values=values)
        return ChatRequest(
            model=adapter if adapter and not kwargs.skip_lora else fields.model,
            sampling=sampling,
            queue=take_queue(fields, body.get("user")),
            stream=self._stream,
            names={
                "messages": "query",
                **{_SAME[name]: f"gen_kwargs.{name}" for name in own_names},
            },
            messages=builder.finish("query"),
        )

    async def admit(self, context: ApiContext, exchange: HttpExchange) -> None:
        """Check that the request's id is not in use, and that its max_new_tokens is allowed.

        Raises ApiError 400, 409 duplicate_request_id.
        """
        assert self._body is not None
        if (asked := self._kwargs.max_new_tokens) is not None:
            check_length(asked, context.options.max_tokens, "gen_kwargs.max_new_tokens")
        if self._body.request_id is None:
            return
        request_name = exchange.request_id = _checked_id(self._body.request_id)
        explain = context.options.explain
        if explain is None or LAST in exchange.headers:  # the id of a resumed stream may be in use
            return
        prompts = await explain(request_name, exchange.caller.id)
        if any(part["state"] in _LIVE for part in prompts):
            raise ApiError(
                409,
                "duplicate_request_id",
                "a request of this request_id has not ended; take another, or none",
                param="request_id",
            )

    def answer(self, call: GenerationCall, resumed: Resumption) -> ItemAnswer:
        kwargs, tokenizer, limit = self._kwargs, call.tokenizer, call.card.max_model_len
        (prompt,) = call.prompts
        begin = kwargs.prefix_token_ids or []
        if begin:
            take_token_ids(begin, "gen_kwargs.prefix_token_ids", call.card.vocab_size)
        silent = kwargs.prefix_text or ""
        added = tokenizer.encode(silent, add_special_tokens=False) if silent else []
        before = [*prompt, *added]
        call.prompts = [[*before, *begin]]
        room = limit - len(call.prompts[0])
        ends = [room]
        if (most := kwargs.max_new_tokens) is not None:
            ends.append(most)
        if (most := kwargs.max_length) is not None:
            ends.append(most - len(prompt))
        if (most := call.common.params.max_tokens) is not None:  # the operator's limit
            ends.append(most)
        if min(ends) < 1:
            whole = limit if room < 1 else kwargs.max_length or limit
            raise context_too_long(whole, len(call.prompts[0]), param="query", where="query")
        call.change_params(max_tokens=min(ends))
        shown = tokenizer.decode(begin, prompt=before)
        assert self._body is not None
        writer = LiteqwenWriter(self._body, shown, logits=bool(kwargs.return_logits))
        return _Answer(call, writer, resumed)


class LiteqwenWriter:
    """The writer of an answer: events {text, delta, logits, code, flag}, or all in one object.

    begin: the text with which the client lets the reply begin.
    """

    def __init__(self, body: LiteqwenChat, begin: str, *, logits: bool) -> None:
        self.wire = Wire()
        self._body, self._begin = body, begin
        self._text = ""
        self._logits: list[JsonObject] = []
        self._told = 0  # entries of _logits that were sent
        self._wants_logits = logits
        self._ended = False

    def open(self, usage: Usage) -> None:
        if self._begin:
            self._say(self._begin)

    def note(self, delta: Delta) -> None:
        """Record the most likely tokens at each position of a delta; called before its text is
        parsed."""
        if not self._wants_logits:
            return
        for scored in delta.logprobs or ():
            pairs = zip(scored.top_ids, scored.top_logprobs, strict=True)
            tops = [{"tid": token, "lgt": logprob + scored.total} for token, logprob in pairs]
            self._logits.append({"pos": len(self._logits), "tops": tops})

    def take_event(self, event: Event, logprobs: list[ScoredToken]) -> None:
        if event.kind == "content" and event.text:
            self._say(event.text)

    def _say(self, text: str) -> None:
        self._text += text
        self._push(text, 200)

    def _push(self, text: str, code: int) -> None:
        new, self._told = self._logits[self._told :], len(self._logits)
        fields = {"text": self._text, "delta": text, "logits": new, "code": code}
        self.wire.push("delta", {**fields, "flag": self._ended})

    def end(self, reason: str, stop: str | int | None, usage: Usage) -> None:
        self._ended = True
        self._push("", 200)

    def fail(self, error: ApiError) -> None:
        self._ended = True
        self._push("", error.status)

    def whole(self) -> JsonObject:
        history = list(self._body.history or [])
        query, role = self._body.query, self._body.role or "user"
        if history and isinstance(history[0], list):
            history.append([query, self._text])
        else:
            history.append({"role": role, "content": query})
            history.append({"role": "assistant", "content": self._text})
        return {
            "response": self._text,
            "history": history,
            "code": 200,
            "logits": self._logits,
            "flag": self._ended,
        }


class _Answer(ItemAnswer):
    def _feed(self, delta: Delta, generation: Generation) -> None:
        assert isinstance(self.writer, LiteqwenWriter)
        if self.choice.finish_reason is None:
            self.writer.note(delta)
        super()._feed(delta, generation)


ROUTES = RouteTable(reads=QUEUES)
ROUTES.post(
    "/chat",
    "A chat, as liteqwen has it",
    LITEQWEN_CHAT,
    ("response", "history", "code", "logits", "flag"),
)(answers(partial(LiteqwenRequest, stream=False)))
ROUTES.post("/stream_chat_post", "The same as events", LITEQWEN_CHAT, kinds=(EVENTS,))(
    answers(partial(LiteqwenRequest, stream=True))
)


@ROUTES.post(
    "/stop_generate",
    "End a request by its id",
    LITEQWEN_STOP,
    ("stopped",),
    statuses=(*READS, *NAMES),
)
async def stop(context: ApiContext, exchange: HttpExchange) -> object:
    """End a running request of this caller, at whichever router it runs. Raises ApiError 404."""
    body = await context.read_as(exchange, LITEQWEN_STOP)
    id = _checked_id(body.request_id)
    ends, caller = context.options.stop, exchange.caller
    count = 0 if ends is None else await ends(id, None if caller.admin else caller.id)
    if not count:
        raise ApiError(
            404, "request_not_found", "no request of this id and key is live", param="request_id"
        )
    return {"request_id": id, "stopped": count}


def _checked_id(id: str) -> str:
    """Check the request id that a client has set, and return it. Raises ApiError 400."""
    if request_id([id.encode()]) != id:
        raise invalid("request_id takes letters, digits and . _ : - alone", "request_id")
    return id


def _add_history(builder: ChatBuilder, value: Any) -> None:
    """Add a chat's history, a list of messages or [question, answer] pairs. Raises ApiError 400."""
    if value is None:
        return
    if not isinstance(value, list):
        raise wrong_type("history", "a list of messages, or of [question, answer] pairs")
    if len(value) > MAX_HISTORY:
        raise invalid(f"history takes at most {MAX_HISTORY} items", "history")
    for i, item in enumerate(value):
        place = f"history[{i}]"
        if type(item) is not type(value[0]):
            raise wrong_type(place, "of the same kind as history[0]")
        if isinstance(item, list):
            if len(item) != 2 or not all(isinstance(text, str) for text in item):
                raise wrong_type(place, "a question and an answer")
            builder.add_message("user", place, item[0])
            builder.add_message("assistant", place, item[1])
        else:
            builder.add_openai_message(MESSAGE.read(item, place), item, place)
