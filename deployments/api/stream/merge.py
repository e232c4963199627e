"""MergedGenerations: the generations of a request's prompts as one. ChoiceOutput: the output of one
choice so far. first_items: waits for the first token, and sends keep-alive comments meanwhile."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence

from deployments.api.generation.call import GenerationCall
from deployments.api.http.errors import ApiError, from_backend
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.output.chat_output import ParsedChoice
from deployments.backend import Backend, Generation, Timing
from engine.batch import TokenLogprobs
from engine.errors import RequestFailed
from engine.messages import Delta, RoutedExperts
from engine.text.detokenizer import ChoiceDecoder, Decoded


class PredictionMatch:
    """The counter of output tokens that match the client's `prediction`, in order.

    The number depends only on the output, not on the engine's drafts or a move to another replica.
    A match ends at a differing token, and resumes after two consecutive output tokens that occur in
    the prediction.

    accepted: the number of matching tokens so far; at most the length of the prediction
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self.accepted = 0
        self._prediction = prediction
        # Index of the prediction's token that would continue the match; -1: no match is in
        # progress.
        self._next = 0
        self._last = -1
        # two consecutive tokens of the prediction -> the index after their first occurrence
        self._after: dict[tuple[int, int], int] = {}
        for place in range(len(prediction), 1, -1):
            self._after[prediction[place - 2], prediction[place - 1]] = place

    @property
    def rejected(self) -> int:
        """The number of predicted tokens without a match in the output."""
        return len(self._prediction) - self.accepted

    def feed(self, tokens: Sequence[int]) -> None:
        """Compare the next output tokens with the prediction; count matching ones in `accepted`."""
        prediction = self._prediction
        for token in tokens:
            place = self._next
            if 0 <= place < len(prediction) and prediction[place] == token:
                self.accepted = min(self.accepted + 1, len(prediction))
                self._next = place + 1
            else:
                self._next = self._after.get((self._last, token), -1)
            self._last = token


MAX_READY = 64  # maximum number of deltas, of all prompts, that wait for the answer


class MergedGenerations:
    """The generations of several prompts as one Generation.

    A choice's number is (index of its prompt) * n + (its index in the prompt's generation). A
    generation is None if all choices of its prompt have ended.

    One task for each prompt reads its generation; there is no task for each token. The first error
    ends all generations. While MAX_READY deltas wait for the client, further deltas remain in the
    generations, which bound their number.
    """

    def __init__(self, generations: list[Generation | None], n: int) -> None:
        self._generations = generations
        self._n = n
        self._ready: list[tuple[int, Delta]] = []
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._read = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._pump(i * n, generation))
            for i, generation in enumerate(generations)
            if generation is not None
        ]
        self._open = len(self._tasks)

    async def _pump(self, base: int, generation: Generation) -> None:
        try:
            while items := await generation.next():
                self._ready += [(base + choice, delta) for choice, delta in items]
                self._news.set()
                while len(self._ready) > MAX_READY:
                    self._read.clear()
                    await self._read.wait()
        except Exception as error:
            self._error = self._error or error
        finally:
            self._open -= 1
            self._news.set()

    async def next(self) -> list[tuple[int, Delta]]:
        while not self._ready and self._open and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        ready, self._ready = self._ready, []
        self._read.set()
        return ready

    def abort(self, choice: int | None = None) -> None:
        if choice is not None:
            generation = self._generations[choice // self._n]
            if generation is not None:
                generation.abort(choice % self._n)
            return
        for generation in filter(None, self._generations):
            generation.abort()
        for task in self._tasks:
            task.cancel()

    def versions(self, choice: int) -> list[tuple[str, int]]:
        generation = self._generations[choice // self._n]
        return [] if generation is None else generation.versions(choice % self._n)

    def timing(self) -> Timing:
        parts = [generation.timing() for generation in filter(None, self._generations)]
        return Timing(
            max((part.queue_s for part in parts), default=0.0),
            sum(part.migrations for part in parts),
            tuple(replica for part in parts for replica in part.replicas),
        )


def start(call: GenerationCall, backend: Backend) -> Generation:
    """Submit all prompts of a call to the backend, or none of them; return the merged generation.
    Raises MantaError."""
    started: list[Generation | None] = []
    try:
        for request in call.requests():
            over = bool(request.emitted) and all(tokens is None for tokens in request.emitted)
            started.append(None if over else backend.generate(request))
    except BaseException:
        for generation in filter(None, started):
            generation.abort()
        raise
    only = started[0] if len(started) == 1 else None
    return MergedGenerations(started, call.common.params.n) if only is None else only


class ChoiceOutput:
    """The output of one choice so far: decoded text, tokens and their log-probabilities.

    index: the choice's number in the call.
    offsets: whether the text positions of tokens are recorded.
    parsed: the parser of its text; None: the parser of the call's OutputPlan, if there is one.
    """

    def __init__(
        self,
        call: GenerationCall,
        index: int = 0,
        *,
        offsets: bool = False,
        parsed: ParsedChoice | None = None,
    ) -> None:
        params = call.common.params
        prompt = call.prompts[index // params.n]
        self.parsed = parsed
        if parsed is None and call.output is not None:
            self.parsed = ParsedChoice(call.output, params, prompt)
        self.decoder = (
            ChoiceDecoder(call.tokenizer, params, prompt=prompt, offsets=offsets)
            if self.parsed is None
            else self.parsed.decoder
        )
        # match with the client's prediction; None: there is no prediction
        expected = call.common.prediction
        self.predicted = PredictionMatch(expected) if expected else None
        self.text: list[str] = []
        self.token_ids: list[int] = []
        # log-probability of each of token_ids, including reasoning and calls, unlike `logprobs`
        self.token_logprobs: list[float | None] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: list[int] = []
        self.scores_prompt = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.routed: RoutedExperts | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.cached = 0

    def feed(self, delta: Delta) -> Decoded:
        """Add a delta to the output, and return its decoded text. The choice must be unfinished.

        If a trainer aborts the request (finish "abort"), the choice ends with the output so far.
        Raises ApiError if the engine ended the choice by an error, or if an abort came before the
        requested prompt log-probabilities.
        """
        unscored = self.scores_prompt and not (self.prompt_logprobs or delta.prompt_logprobs)
        if delta.finish == "error" or (delta.finish == "abort" and unscored):
            raise failed(delta)
        if self.parsed is None:
            decoded = self.decoder.feed(delta.token_ids, delta.finish, delta.stop_token)
        else:
            decoded = self.parsed.feed(delta)
        if self.predicted is not None:
            self.predicted.feed(delta.token_ids[: decoded.num_tokens])
        if delta.cached >= 0:
            self.cached = delta.cached
        self.routed = delta.routed or self.routed
        if delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs
        if decoded.finish_reason is not None:
            self.finish_reason = decoded.finish_reason
            self.stop_reason = decoded.stop_reason
        return decoded

    def bring(self, token_ids: list[int]) -> None:
        """Feed tokens that the resuming client already has, so that they are not sent again.

        token_ids: the tokens, none of which ended the choice.
        """
        if self.predicted is not None:
            self.predicted.feed(token_ids)
        if self.parsed is None:
            self.decoder.feed(token_ids)
        else:
            self.parsed.feed(Delta(0, token_ids))
            self.parsed.forget_new()


def failed(delta: Delta) -> ApiError:
    """Return the error for a choice that ended by an engine error, or by a trainer's abort."""
    if delta.finish == "abort":
        message = "a trainer's pause or abort ended this request; send it again"
        return ApiError(503, "aborted", message, retry_after=1)
    code, _, message = delta.error.partition(": ")
    if not message:
        return ApiError(500, "engine_error", "the engine gave this request up")
    return from_backend(RequestFailed(message, code=code))


def ended_early() -> ApiError:
    """Return the error for a generation that ended before all of its choices."""
    return ApiError(500, "engine_error", "the generation ended early")


def routed_experts(routed: RoutedExperts | None) -> JsonObject | None:
    """Return the experts chosen for a choice's tokens, as the JSON of answers."""
    if routed is None:
        return None
    data = b64encode(routed.data).decode()
    return {"data": data, "shape": [*routed.shape], "dtype": routed.dtype}


def weight_versions(generation: Generation, choice: int, num_tokens: int) -> list[JsonObject]:
    """Return the weights versions that sampled a choice's tokens, as the JSON of answers.

    num_tokens: the number of the choice's tokens in the answer, without those after a stop string.
    """
    parts: list[JsonObject] = []
    for version, count in generation.versions(choice):
        if shown := min(count, num_tokens):
            parts.append({"version": version, "num_tokens": shown})
        num_tokens -= shown
    return parts


EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
COMMENT = b": waiting for the first token\n\n"  # clients of server-sent events skip it
HOLD_SECONDS = 45.0  # maximum silence without a replica; proxies allow 60 s or more


async def first_items(
    generation: Generation, exchange: HttpExchange, seconds: float
) -> list[tuple[int, Delta]]:
    """Return the result of `generation.next()`, and send keep-alive comments while waiting for it.

    seconds: the time between comments; 0: none are sent.

    Without comments, proxies that limit silence would cut streams of long prompts. The first
    comment follows the answer's head, after which no error status can be sent. Therefore the head
    is sent only when a replica has the request, or after HOLD_SECONDS: an early failure is an
    ordinary error answer, and HAProxy can retry a request at another router if its router ended
    without an answer.

    Raises the errors of next(), ClientDisconnected, and, unless the head was sent, the error of a
    choice that the engine refused.
    """
    if not seconds:
        items = await generation.next()
    else:
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = loop.create_task(generation.next())
        try:
            while not (await asyncio.wait({first}, timeout=seconds))[0]:
                if not exchange.started:
                    placed = generation.timing().replicas
                    if not placed and loop.time() - began < HOLD_SECONDS:
                        continue
                    await exchange.start(EVENT_STREAM, STREAM_HEADERS)
                await exchange.write(COMMENT)
            items = first.result()
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
    if not exchange.started:
        for _, delta in items:
            if delta.finish == "error":
                raise failed(delta)
    return items
