"""OpenAIResponse: writes the answer to a generation call, whole or as server-sent events.

The stream is the router's hot path: a chunk's constant bytes are encoded once per choice, only the
text is escaped, and all deltas available at a wake-up are sent together. Measure the cost of each
line that is added to `stream`.
"""

import secrets
import time
from functools import partial
from typing import Any

import msgspec

from deployments.api.generation.call import GenerationCall, scored_entries
from deployments.api.generation.request import ChatRequest
from deployments.api.http.errors import ApiError, from_backend
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject, in_thread
from deployments.api.stream.event_ids import ENDED, FINISHED, OPENED
from deployments.api.stream.logprobs import (
    PromptLogprobs,
    ScoredTexts,
    chat_logprobs,
    completion_logprobs,
    own_logprobs,
    prompt_logprobs,
    with_first,
)
from deployments.api.stream.merge import (
    COMMENT,
    EVENT_STREAM,
    STREAM_HEADERS,
    ChoiceOutput,
    ended_early,
    first_items,
    routed_experts,
    weight_versions,
)
from deployments.api.stream.replay import Resumption, StreamReplay
from deployments.backend import Generation
from deployments.deltas import coalesce
from engine.batch import TokenLogprobs
from engine.errors import MantaError
from engine.messages import Delta
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ChoiceDecoder, Decoded

_ENTRY_CHARS = 16  # minimum length of one token's log-probability in JSON
# Maximum number of events of a choice in one send; beyond it the deltas are merged into one event.
MAX_EVENTS = 4

_json = msgspec.json.encode


class OpenAIResponse:
    """The answer of OpenAI's dialect to one generation call, streamed or whole."""

    def __init__(self, call: GenerationCall, resumed: Resumption) -> None:
        ids = resumed.ids
        self.call, self.request = call, call.request
        self._by_id = call.request.token_names
        self.ids = ids
        self.chat = chat = isinstance(call.request, ChatRequest)
        self.wants_logprobs = call.common.params.logprobs is not None
        count = len(call.prompts) * call.common.params.n
        offsets = self.wants_logprobs and not chat
        self.choices = [ChoiceOutput(call, index, offsets=offsets) for index in range(count)]
        number = secrets.token_bytes(12) if ids is None else ids.number
        self._number = number
        self.head: JsonObject = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number.hex()}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()) if ids is None else ids.created,
            "model": call.card.id,
            "system_fingerprint": call.card.fingerprint or None,
        }
        # generation whose usage is reported in each event; None: events do not report usage
        self._metered: Generation | None = None
        self._echo_due = set(range(count)) if self.request.echo and self.wants_logprobs else set()
        self._replay: StreamReplay | None = None
        if ids is not None and ids.resumed:
            self._replay = StreamReplay(call, ids, self.choices, resumed.past)
            n = call.common.params.n
            emitted = self._replay.emitted
            call.emitted = [emitted[i : i + n] for i in range(0, count, n)]
            self._echo_due = {i for i in self._echo_due if not ids.shown[i].phase}

    # --- whole ---

    async def collect(self, generation: Generation) -> bytes:
        """Wait for all choices and return the JSON body. Raises ApiError, MantaError."""
        choices = self.choices
        unfinished = len(choices)
        while unfinished:
            items = await generation.next()
            if not items:
                raise ended_early()
            for index, delta in items:
                choice = choices[index]
                if choice.finish_reason is not None:
                    continue
                decoded = choice.feed(delta)
                choice.text.append(decoded.text)
                num_tokens = decoded.num_tokens
                choice.token_ids += delta.token_ids[:num_tokens]
                choice.token_logprobs += own_logprobs((delta.logprobs or [])[:num_tokens])
                if self.wants_logprobs:
                    choice.logprobs += self._scored(choice, delta, num_tokens)
                    choice.offsets += decoded.offsets[:num_tokens]
                if decoded.finish_reason is not None:
                    unfinished -= 1
                    if unfinished and not delta.finish:
                        generation.abort(index)
        usage = self.usage(generation)
        return await in_thread(lambda: self._body(usage, generation), self._logprobs_size())

    def _body(self, usage: JsonObject, generation: Generation) -> bytes:
        call = self.call
        shaped = [self._whole(index, choice) for index, choice in enumerate(self.choices)]
        if self.request.return_token_ids and not call.score_only:
            for index, choice in enumerate(self.choices):
                parts = weight_versions(generation, index, len(choice.token_ids))
                shaped[index]["weight_versions"] = parts
        body = {**self.head, "choices": shaped, "usage": usage}
        if self.chat and call.prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        if self.chat and self.request.return_token_ids:
            body |= self._prompt_ids(0)
        return _json(body)

    def _logprobs_size(self) -> int:
        """Estimate the size of the answer's log-probabilities, in characters.

        The size decides whether `in_thread` uses a thread.
        """
        params = self.call.common.params
        prompts = 0 if params.prompt_logprobs is None else scored_entries(self.call)
        outputs = sum(len(choice.logprobs) for choice in self.choices)
        return _ENTRY_CHARS * (prompts + outputs * (1 + (params.logprobs or 0)))

    def _whole(self, index: int, choice: ChoiceOutput) -> JsonObject:
        call = self.call
        text = "" if call.score_only else "".join(choice.text)
        shaped: JsonObject = {"index": index}
        if self.chat:
            if choice.parsed is None:
                shaped["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                shaped["message"] = choice.parsed.message(self._number, index)
            shaped["logprobs"] = None
            if self.wants_logprobs:
                content = chat_logprobs(call.tokenizer, choice.logprobs, by_id=self._by_id)
                shaped["logprobs"] = {"content": content, "refusal": None}
        else:
            prompt = self._prompt_of(index)
            shaped["text"] = call.texts[prompt] + text if self.request.echo else text
            shaped["logprobs"] = self._completion_logprobs(index, choice)
            if call.prompt_logprobs:
                shaped["prompt_logprobs"] = self._prompt_logprobs(index)
            if self.request.return_token_ids:
                shaped |= self._prompt_ids(index)
        shaped["finish_reason"] = "length" if call.score_only else choice.finish_reason
        shaped["stop_reason"] = None if call.score_only else choice.stop_reason
        if call.common.params.return_routed_experts:
            shaped["routed_experts"] = routed_experts(choice.routed)
        if self.request.return_token_ids:
            ids, scores = choice.token_ids, choice.token_logprobs
            shaped |= self._ids([], []) if call.score_only else self._ids(ids, scores)
        return shaped

    def _ids(self, ids: list[int], scores: list[float | None]) -> JsonObject:
        """Return tokens as ids, with their log-probabilities if the request wants them."""
        return {"token_ids": ids, **({"token_logprobs": scores} if self.wants_logprobs else {})}

    def _prompt_ids(self, index: int) -> JsonObject:
        """Return a choice's prompt as token ids, with log-probabilities if they were requested."""
        ids = self.call.prompts[self._prompt_of(index)]
        if not self.call.prompt_logprobs:
            return {"prompt_token_ids": ids}
        items = with_first(self.choices[index].prompt_logprobs, len(ids))
        return {"prompt_token_ids": ids, "prompt_token_logprobs": own_logprobs(items)}

    def _prompt_of(self, index: int) -> int:
        return index // self.call.common.params.n

    def _prompt_logprobs(self, index: int) -> PromptLogprobs:
        length = len(self.call.prompts[self._prompt_of(index)])
        items = with_first(self.choices[index].prompt_logprobs, length)
        return prompt_logprobs(self.call.tokenizer, items)

    def _completion_logprobs(self, index: int, choice: ChoiceOutput) -> ScoredTexts | None:
        if not self.wants_logprobs:
            return None
        call = self.call
        echoed = self._echo_logprobs(index) if self.request.echo else None
        if call.score_only:
            return echoed
        own = self._texts_scored(index, choice.token_ids, choice.logprobs, choice.offsets)
        return own if echoed is None else echoed + own

    def _texts_scored(
        self, index: int, ids: list[int], items: list[TokenLogprobs], offsets: list[int]
    ) -> ScoredTexts:
        """Return the log-probabilities of a choice's tokens, with text offsets that include an
        echoed prompt.

        offsets: position of each token's text in the choice's text, in characters
        """
        shift = len(self.call.texts[self._prompt_of(index)]) if self.request.echo else 0
        shifted = [offset + shift for offset in offsets]
        return completion_logprobs(self.call.tokenizer, ids, items, shifted, by_id=self._by_id)

    def _echo_logprobs(self, index: int) -> ScoredTexts:
        """Return the log-probabilities of a choice's prompt, for `echo`."""
        call = self.call
        place = self._prompt_of(index)
        ids = call.prompts[place]
        begin, end = call.tokenizer.written(call.texts[place], ids)
        decoder = ChoiceDecoder(
            call.tokenizer, SamplingParams(skip_special_tokens=False), offsets=True
        )
        decoded = decoder.feed(ids[begin:end], "length")
        last = [len(decoded.text)] * (len(ids) - end)
        offsets = [0] * begin + decoded.offsets + last
        items = with_first(self.choices[index].prompt_logprobs, len(ids))
        return completion_logprobs(call.tokenizer, ids, items, offsets, by_id=self._by_id)

    def usage(self, generation: Generation) -> JsonObject:
        """Return the object `usage` of the answer.

        A prompt counts once, however many choices it has. The prompt's cached tokens are the fewest
        that any of its choices found in the prefix cache.
        """
        call, n = self.call, self.call.common.params.n
        prompt = sum(map(len, call.prompts))
        output = 0 if call.score_only else sum(c.decoder.num_tokens for c in self.choices)
        cached = sum(
            min(map(self._cached, range(i * n, (i + 1) * n))) for i in range(len(call.prompts))
        )
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        details = {}
        if call.output is not None and call.output.reasoning is not None:
            thought = sum(c.parsed.reasoning_tokens for c in self.choices if c.parsed is not None)
            details["reasoning_tokens"] = thought
        if matches := [c.predicted for c in self.choices if c.predicted is not None]:
            details["accepted_prediction_tokens"] = sum(match.accepted for match in matches)
            details["rejected_prediction_tokens"] = sum(match.rejected for match in matches)
        if details:
            usage["completion_tokens_details"] = details
        if call.timing:
            timing = generation.timing()
            usage["timing"] = {
                "queue_ms": round(timing.queue_s * 1000, 3),
                "migrations": timing.migrations,
                "replicas": timing.replicas,
            }
        return usage

    def _cached(self, index: int) -> int:
        shown = None if self.ids is None else self.ids.shown[index]
        return shown.cached if shown is not None and shown.tokens else self.choices[index].cached

    # --- streamed ---

    async def stream(
        self, generation: Generation, exchange: HttpExchange, keepalive: float
    ) -> None:
        """Write server-sent events until all choices have ended.

        Until the first tokens a keep-alive comment is sent every `keepalive` seconds (0: none). The
        HTTP status is sent with the first comment or event. An earlier failure is an ordinary error
        answer; a later failure is an event ``data: {"error": ...}`` without ``[DONE]`` after it.
        Raises ApiError or MantaError before the start, ClientDisconnected at any time.
        """
        choices, ids = self.choices, self.ids
        skipping: dict[int, int] = {}
        unfinished = len(choices)
        if self._replay is not None:
            skipping = self._replay.skipping
            unfinished = sum(choice.finish_reason is None for choice in choices)
        plain = self.call.output is None and not (
            self.wants_logprobs
            or self.request.return_token_ids
            or self.call.score_only
            or self.request.continuous_usage
        )
        if self.request.continuous_usage:
            self._metered = generation
        before, after = self._frames()
        try:
            items = await first_items(generation, exchange, keepalive) if unfinished else []
            if unfinished and not items:
                raise ended_early()
            if not exchange.started:
                await exchange.start(EVENT_STREAM, STREAM_HEADERS)
            out = self._opening()
            spoke = time.monotonic()
            while True:
                for index, delta in items if len(items) == 1 else coalesce(items, MAX_EVENTS):
                    choice = choices[index]
                    if choice.finish_reason is not None:
                        continue
                    if index in skipping:
                        assert self._replay is not None
                        delta, decoded = self._replay.skip(index, choice, delta)
                    else:
                        decoded = choice.feed(delta)
                    if not plain and index in self._echo_due and (delta.token_ids or delta.finish):
                        echo = partial(self._echo_event, index)
                        out.append(await in_thread(echo, self._logprobs_size()))
                    if ids is not None:
                        shown = delta.token_ids[: decoded.num_tokens]
                        ended = decoded.finish_reason is not None
                        ids.took(index, shown, choice.cached, ended)
                    if plain:
                        # Send an event even if it has no text yet, because a character or stop
                        # string is incomplete: clients measure the time to the first token and
                        # between tokens.
                        if decoded.text or (decoded.num_tokens and not decoded.finish_reason):
                            if ids is not None:
                                out.append(ids.line())
                            out += (before[index], _json(decoded.text), after)
                    else:
                        out.append(self._event(index, delta, decoded))
                    if decoded.finish_reason is not None:
                        out.append(self._finish_event(index))
                        unfinished -= 1
                        if unfinished and not delta.finish:
                            generation.abort(index)
                if not unfinished:
                    break
                if out:
                    await exchange.write(b"".join(out))
                    out = []
                elif skipping and keepalive and time.monotonic() > spoke + keepalive:
                    await exchange.write(COMMENT)
                    spoke = time.monotonic()
                items = await generation.next()
                if not items:
                    raise ended_early()
        except (ApiError, MantaError) as error:
            if not exchange.started:
                raise
            answer = from_backend(error)
            await exchange.write(b"data: %b\n\n" % answer.body(), more=False)
            return
        if self.request.usage and not (ids is not None and ids.told):
            if ids is not None:
                ids.tell(1)
            out.append(self._data({"choices": [], "usage": self.usage(generation)}))
        out.append(b"data: [DONE]\n\n")
        await exchange.write(b"".join(out), more=False)

    def _data(self, fields: JsonObject) -> bytes:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        line = b"" if self.ids is None else self.ids.line()
        return b"%bdata: %b\n\n" % (line, _json({**self.head, "object": name, **fields}))

    def _chunk(self, choice: JsonObject) -> bytes:
        fields: JsonObject = {"choices": [choice]}
        if self._metered is not None:
            fields["usage"] = self.usage(self._metered)
        elif self.request.usage:
            fields["usage"] = None
        return self._data(fields)

    def _frames(self) -> tuple[list[bytes], bytes]:
        """Return the constant bytes before an event's text, per choice, and the bytes after the
        text."""
        mark = secrets.token_hex(16)
        before = []
        after = b""
        for index in range(len(self.choices)):
            event = self._chunk(self._shaped(index, mark, None))
            start, after = event.split(_json(mark))
            before.append(start[start.index(b"data: ") :])
        return before, after

    def _shaped(self, index: int, text: str, logprobs: Any) -> JsonObject:
        body: JsonObject = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": None}

    def _opening(self) -> list[bytes]:
        """Return the events before the first token.

        An echoed prompt with log-probabilities is left out, as these arrive with the first token. A
        resumed stream gets the opening and finish events that its client has not received.
        """
        events = []
        for i, choice in enumerate(self.choices):
            phase = 0 if self.ids is None else self.ids.shown[i].phase
            if phase == ENDED and choice.finish_reason is not None:
                events.append(self._finish_event(i))
            if phase or not (self.chat or (self.request.echo and not self.wants_logprobs)):
                continue
            if self.ids is not None:
                self.ids.enter(i, OPENED)
            shaped = self._shaped(i, "" if self.chat else self.call.texts[self._prompt_of(i)], None)
            if self.chat:
                # Clients append later content to this text. It is null if the answer may have tool
                # calls only.
                empty = None if self.call.output is not None and self.call.output.calls else ""
                shaped["delta"] = {"role": "assistant", "content": empty}
            events.append(self._chunk(shaped))
        return events

    def _echo_event(self, index: int) -> bytes:
        """Return the event of the echoed prompt, with the log-probabilities of its tokens.

        The log-probabilities arrive with the first token at the latest.
        """
        self._echo_due.discard(index)
        if self.ids is not None:
            self.ids.enter(index, OPENED)
        text = self.call.texts[self._prompt_of(index)]
        return self._chunk(self._shaped(index, text, self._echo_logprobs(index)))

    def _event(self, index: int, delta: Delta, decoded: Decoded) -> bytes:
        """Return the event of a delta, with text and any other requested fields; b"" if there are
        none."""
        call, choice = self.call, self.choices[index]
        num_tokens = decoded.num_tokens
        message: JsonObject | None = None
        if choice.parsed is not None:
            message = choice.parsed.delta(self._number, index)
            scored = self.wants_logprobs and any(choice.parsed.is_content)
            if not message and not (num_tokens and (self.request.return_token_ids or scored)):
                return b""
        elif call.score_only or not (num_tokens or decoded.text):
            return b""
        logprobs: JsonObject | ScoredTexts | None = None
        if self.wants_logprobs:
            items = self._scored(choice, delta, num_tokens)
            if self.chat:
                content = chat_logprobs(call.tokenizer, items, by_id=self._by_id)
                logprobs = {"content": content, "refusal": None}
            else:
                ids, offsets = delta.token_ids[:num_tokens], decoded.offsets[:num_tokens]
                logprobs = self._texts_scored(index, ids, items, offsets)
        shaped = self._shaped(index, decoded.text, logprobs)
        if message is not None:
            shaped["delta"] = message
        if self.request.return_token_ids:
            ids, items = delta.token_ids[:num_tokens], (delta.logprobs or [])[:num_tokens]
            shaped |= self._ids(ids, own_logprobs(items))
        return self._chunk(shaped)

    def _scored(self, choice: ChoiceOutput, delta: Delta, kept: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of those tokens of a delta that are content.

        kept: the number of the delta's tokens up to the end of the choice
        """
        items = (delta.logprobs or [])[:kept]
        if choice.parsed is None:
            return items
        return [item for item, shown in zip(items, choice.parsed.is_content, strict=False) if shown]

    def _finish_event(self, index: int) -> bytes:
        choice = self.choices[index]
        if self.ids is not None:
            self.ids.enter(index, FINISHED)
        body: JsonObject = {"delta": {}} if self.chat else {"text": ""}
        reason = "length" if self.call.score_only else choice.finish_reason
        stop = None if self.call.score_only else choice.stop_reason
        return self._chunk(
            {"index": index, **body, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
        )
