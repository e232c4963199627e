"""InflightRequest, InflightChoice: the state from which any replica can continue a request.

An InflightRequest is one prompt. An InflightChoice is one of its n continuations, which runs at one
replica at a time. To continue at another replica, `InflightChoice.as_request` appends the emitted
tokens to the prompt. The engine counts max_tokens and its random numbers from the prompt's end, so
the text is the same as without the loss of a replica.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol

import msgspec

from deployments.backend import GenerationRequest, Timing
from deployments.deltas import coalesce
from deployments.observe.metrics import RouterMetrics
from deployments.router.poison import Suspicion
from deployments.router.request_trace import RequestTrace
from engine.errors import MantaError
from engine.messages import Delta, EngineRequest

# Estimated unread bytes of a stream beyond which the stream is paused.
UNREAD_BYTES = 2**20
READER_SECONDS = 30.0  # seconds for which a paused stream is kept before it fails
KEEP_SECONDS = 20.0  # seconds for which a prefill replica holds the KV blocks of a prompt
DELTA_BYTES = 256  # estimated bytes of a delta with one token
LOGPROB_BYTES = 192  # estimated bytes of a log-probability
_MAX_ITEMS = 256  # deltas of a choice that is read at its end, after which they are merged


class InflightChoice:
    """A choice in flight: the output tokens so far, and the replica that runs the choice.

    id: number of the choice in messages to replicas. index: its index among the request's choices.
    emitted: output token ids so far.
    place: name of the replica that runs the choice; "" if none does.
    begun: number of output tokens before the choice was sent to its present replica.
    suspicion: the engine deaths that the choice may have caused; see poison.py.
    weights: identity of the weights of the choice's last replica; the choice may only continue with
        the same weights.
    version: version of the weights that sampled the last tokens; "" before the first token.
    prefill: whether its present replica computes the prompt and the first token only.
    """

    __slots__ = (
        "_version_starts",
        "begun",
        "done",
        "emitted",
        "id",
        "index",
        "inflight",
        "last",
        "place",
        "prefill",
        "suspicion",
        "version",
        "weights",
    )

    def __init__(self, inflight: "InflightRequest", index: int, id: int) -> None:
        self.inflight = inflight
        self.index = index
        self.id = id
        self.emitted: list[int] = []
        self.place = ""
        self.weights = ""
        self.version = ""
        # (weights version, index in `emitted` of its first token)
        self._version_starts: list[tuple[str, int]] = []
        self.begun = 0
        self.suspicion = Suspicion()
        self.prefill = False
        self.last = 0.0  # monotonic seconds of the last delta; 0 before the first
        self.done = False

    def change_version(self, version: str) -> None:
        """Record that the next tokens are sampled by another version of the weights."""
        self.version = version
        self._version_starts.append((version, len(self.emitted)))

    def versions(self) -> list[tuple[str, int]]:
        """Return (weights version, number of tokens) of each part of `emitted`, in order.

        Tokens that a resumed stream started with are left out.
        """
        ends = [start for _, start in self._version_starts[1:]] + [len(self.emitted)]
        return [
            (version, end - start)
            for (version, start), end in zip(self._version_starts, ends, strict=True)
        ]

    @property
    def given(self) -> int:
        """The number of tokens that the choice's present replica has generated."""
        return len(self.emitted) - self.begun

    def as_request(self) -> EngineRequest:
        """Return the message that starts the choice, or resumes it after the emitted tokens.

        max_tokens is limited to the tokens of the probation (poison.py) if the choice is a suspect,
        and to one token for a prefill replica.
        """
        request = self.inflight.request
        params = request.params
        if (self.last or self.emitted) and params.prompt_logprobs is not None:
            # Prompt logprobs arrived with the first delta; requesting them again would disable the
            # prefix cache for no benefit.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        if self.suspicion.tokens or self.prefill:
            limit = len(self.emitted) + self._first_tokens
            if params.max_tokens is None or limit < params.max_tokens:
                least = min(params.min_tokens, limit)
                params = msgspec.structs.replace(params, max_tokens=limit, min_tokens=least)
        return EngineRequest(
            id=self.id,
            token_ids=request.token_ids + self.emitted,
            num_prompt_tokens=len(request.token_ids),
            params=params,
            seed=request.seed,
            choice=self.index,
            cache_salt=request.cache_salt,
            adapter=request.adapter_key,
            priority=request.priority,
            request_id=request.request_id,
            prediction=request.prediction,
            speculate=request.speculate,
            images=request.images,
            verbatim=request.verbatim,
            keep_seconds=KEEP_SECONDS if self.prefill else 0.0,
        )

    @property
    def _first_tokens(self) -> int:
        """The number of tokens after which the choice's probation or prefill ends; 0: it has
        neither."""
        return self.suspicion.tokens or int(self.prefill)

    def passes(self, delta: Delta, context: int) -> bool:
        """Whether a delta ends only the choice's probation or prefill, not the choice itself.

        context: context length of the replica's model, in tokens.
        """
        total = len(self.emitted) + len(delta.token_ids)
        tokens, request = self._first_tokens, self.inflight.request
        limit = request.params.max_tokens
        return (
            delta.finish == "length"
            and 0 < tokens == total - self.begun
            and (limit is None or total < limit)
            and len(request.token_ids) + total < context
        )


class ChoiceAssignment(Protocol):
    """The interface of `assignment.Assignment` that a request uses.

    numbers: yields a new number for a choice each time.
    """

    numbers: Iterator[int]

    def take_off(self, choices: list[InflightChoice]) -> None:
        """Abort unfinished choices at their replicas."""

    def bring_back(self, choices: list[InflightChoice]) -> None:
        """Send choices again that were aborted because the client did not read."""


class EndedRequests(Protocol):
    """The interface of `requests_in_flight.RequestsInFlight` that a request uses."""

    def ended(self, inflight: "InflightRequest") -> None:
        """Handle the end of a request's last choice. Called once per request."""


class InflightRequest:
    """A request in flight; it implements `deployments.backend.Generation`."""

    def __init__(
        self,
        request: GenerationRequest,
        metrics: RouterMetrics,
        assignment: ChoiceAssignment,
        requests: EndedRequests,
    ) -> None:
        self.request = request
        self.arrived = time.monotonic()
        numbers, n = assignment.numbers, request.params.n
        self.choices = [InflightChoice(self, index, next(numbers)) for index in range(n)]
        self._open = len(self.choices)
        for choice, tokens in zip(self.choices, request.emitted, strict=False):
            # The request resumes a stream; another router has sent its first tokens.
            choice.done = tokens is None
            choice.emitted = list(tokens or ())
            choice.weights = request.weights
            self._open -= choice.done
        self.trace = RequestTrace(request, self.arrived)
        self.timers: list[asyncio.TimerHandle] = []
        self.placed = 0.0  # monotonic seconds of the last Submit message
        self.replicas: list[str] = []  # names of replicas that the request was sent to
        self.migrations = 0
        self._queue_s = 0.0
        self._metrics = metrics
        metrics.prompt_tokens.inc(len(request.token_ids))
        if request.images:
            metrics.images.inc(len(request.images))
        if not request.params.pooled:
            metrics.prompt_size.observe(len(request.token_ids))
        self._assignment = assignment
        self._requests = requests
        k = request.params.logprobs
        delta_bytes = DELTA_BYTES + (0 if k is None else LOGPROB_BYTES * (k + 1))
        self._most_unread = UNREAD_BYTES // delta_bytes
        self._paused: asyncio.TimerHandle | None = None
        self._holds = request.whole  # whether `next` waits for the end of all choices
        self._items: list[tuple[int, Delta]] = []
        self._error: MantaError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether any choice has output tokens."""
        return any(choice.emitted for choice in self.choices)

    @property
    def output_tokens(self) -> int:
        """The number of output tokens of all choices so far."""
        return sum(len(choice.emitted) for choice in self.choices)

    @property
    def paused(self) -> bool:
        """Whether the stream is paused: no replica runs its choices, because the client does not
        read."""
        return self._paused is not None

    async def next(self) -> list[tuple[int, Delta]]:
        while not self._items or (self._holds and self._open):
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            if self._paused is not None:
                self._resume()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return coalesce(items, 1) if self.request.whole else items

    def abort(self, choice: int | None = None) -> None:
        wanted = self.choices if choice is None else self.choices[choice : choice + 1]
        stopped = [candidate for candidate in wanted if not candidate.done]
        if stopped:
            self._metrics.finished.inc(len(stopped), "abort")
            self.trace.finish += ["abort"] * len(stopped)
            self._end(stopped)

    def cut(self) -> None:
        """End the request with the output so far; its unfinished choices get finish "abort"."""
        self._items += [
            (choice.index, Delta(choice.id, [], "abort"))
            for choice in self.choices
            if not choice.done
        ]
        self.abort()

    def versions(self, choice: int) -> list[tuple[str, int]]:
        return self.choices[choice].versions()

    def timing(self) -> Timing:
        return Timing(self._queue_s, self.migrations, tuple(self.replicas))

    def fail(self, error: MantaError) -> None:
        """End the request with an error, which `next` raises once all received deltas were
        returned."""
        if self._open:
            self._metrics.failed.inc(1, error.code)
            self._error = error
            self._end([choice for choice in self.choices if not choice.done])

    def take_delta(self, choice: InflightChoice, delta: Delta, now: float) -> None:
        """Add a delta to a choice that is not done.

        now: monotonic seconds.
        """
        metrics = self._metrics
        tokens = len(delta.token_ids)
        if choice.last == 0.0:
            if not self.request.params.pooled:
                metrics.first_token.observe(now - self.arrived)
            elif delta.vector is not None:
                metrics.vector.observe(now - self.arrived)
                metrics.vector_tokens.inc(len(self.request.token_ids))
            queued = self.placed - self.arrived + max(0, delta.queued_us) / 1e6
            self._queue_s = max(self._queue_s, queued)
            self.trace.begun(delta, now)
            if delta.cached > 0:
                metrics.cached_tokens.inc(delta.cached)
            choice.last = now
        elif tokens:
            metrics.between.observe((now - choice.last) / tokens, tokens)
            delta.cached = -1
            choice.last = now
        if tokens:
            choice.emitted += delta.token_ids
            metrics.output_tokens.values[()] += tokens
            if tokens > 1:
                # A step emits one token plus the accepted draft tokens.
                self.trace.drafted(tokens - 1)
        self._items.append((choice.index, delta))
        if delta.finish:
            choice.done = True
            self._open -= 1
            metrics.finished.inc(1, delta.finish)
            self.trace.finish.append(delta.finish)
            if not self.request.params.pooled:
                metrics.output_size.observe(len(choice.emitted))
            if not self._open:
                self._finish(now)
        if delta.finish == "error":
            self._holds = False
        if self._holds and self._open:
            if len(self._items) > _MAX_ITEMS * len(self.choices):
                self._items = coalesce(self._items, 1)
        elif self._waiter is not None:
            self._wake()
        elif len(self._items) > self._most_unread and self._open and self._paused is None:
            self._pause()

    def _pause(self) -> None:
        """Pause a stream that the client does not read.

        The unfinished choices are aborted at their replicas. When the client reads again, they
        continue as after the loss of a replica.
        """
        self._metrics.paused.inc()
        self.trace.moves(
            self.choices[0].place, "the client did not read its answer", time.monotonic()
        )
        error = MantaError(
            f"nothing of the answer was read for {READER_SECONDS:g} s", code="slow_reader"
        )
        loop = asyncio.get_running_loop()
        self._paused = loop.call_later(READER_SECONDS, self.fail, error)
        self.timers.append(self._paused)
        self._assignment.take_off([choice for choice in self.choices if not choice.done])

    def _resume(self) -> None:
        assert self._paused is not None
        self._paused.cancel()
        self.timers.remove(self._paused)
        self._paused = None
        self._assignment.bring_back([choice for choice in self.choices if not choice.done])

    def _end(self, stopped: list[InflightChoice]) -> None:
        for choice in stopped:
            choice.done = True
        self._open -= len(stopped)
        self._assignment.take_off(stopped)
        if not self._open:
            self._finish(time.monotonic())
            self._wake()

    def _finish(self, now: float) -> None:
        for timer in self.timers:
            timer.cancel()
        if not self.request.params.pooled:
            self._metrics.request.observe(now - self.arrived)
        error = "" if self._error is None else self._error.code
        self.trace.ends(self.output_tokens, error, now)
        # Pixels are kept for a move to another replica; a finished request never moves.
        self.request.images = []
        self._requests.ended(self)

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None
