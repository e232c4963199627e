"""RequestTrace: times and moves of a request, for GET /v1/requests/{id} and OpenTelemetry spans.

The router of the request keeps the trace. Events are recorded when the request is sent to a
replica, gets its first token or accepted drafts, moves or ends, but not for each token. A trace
holds no tokens and no text, so thousands of traces take a few megabytes. Times are arguments.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from deployments.backend import GenerationRequest
from deployments.observe.otlp import (
    SERVER,
    Span,
    TraceContext,
    TracingSettings,
    new_context,
    read_context,
)
from deployments.routing.decision import Reason, RoutingDecision
from engine.messages import Delta

# Number of traces of ended requests that a router keeps; the oldest are dropped first.
KEPT = 4096
_EVENTS = 32  # number of last decisions, and of last moves, that a trace keeps

logger = logging.getLogger("manta.router")

_WHY: dict[Reason, str] = {
    "load": "the least expected wait",
    "prefix": "it has the beginning of the prompt in its cache",
    "adapter": "it has the adapter",
    "owner": "it shall be the one that has this prefix or adapter",
    "session": "its session is there",
    "spill": "the one that has the prefix or adapter is too busy",
    "move": "it takes the beginning of the prompt from the one that has it, which is too busy "
    "or leaves",
    "handover": "it goes on with the prompt that a replica for prompts has computed",
    "only": "no other replica could take it",
}


class RequestTrace:
    """The trace of one prompt and its choices. Times are monotonic seconds; 0: not yet.

    owner: digest of the API key that sent the request, which alone may see it; "" without keys.
    """

    __slots__ = (
        "_decisions",
        "_moves",
        "accepted_runs",
        "adapter",
        "adapter_us",
        "arrived",
        "cached",
        "choices",
        "ended",
        "engine_us",
        "error",
        "finish",
        "first",
        "id",
        "max_tokens",
        "model",
        "output_tokens",
        "owner",
        "placed",
        "prompt_tokens",
        "received_at",
        "started",
        "state",
    )

    def __init__(self, request: GenerationRequest, arrived: float) -> None:
        self.id = request.request_id
        self.owner = request.owner
        self.model = request.model
        self.adapter = request.adapter_key
        self.prompt_tokens = len(request.token_ids)
        self.choices = request.params.n
        self.max_tokens = request.params.max_tokens
        self.arrived = arrived
        self.received_at = time.time()
        self.state = "waiting"
        self.placed = 0.0  # time at which a replica was first chosen
        # Microseconds from arrival in the engine to the first step, for the choice with the first
        # token.
        self.engine_us = -1
        self.adapter_us = -1  # the part of engine_us until the adapter was on the device
        self.started = 0.0  # start of the request's first engine step
        self.first = 0.0
        self.cached = 0
        self.output_tokens = 0
        # number of draft tokens accepted in a step -> number of such steps
        self.accepted_runs: dict[int, int] = {}
        self.finish: list[str] = []
        self.error = ""
        self.ended = 0.0
        self._decisions: list[tuple[float, RoutingDecision, int]] = []
        self._moves: list[tuple[float, str, str]] = []

    # -- events

    def sent(self, decision: RoutingDecision, now: float, emitted: int) -> None:
        """Record that the request is sent to a replica. emitted: number of output tokens so far."""
        self.placed = self.placed or now
        self.state = "running"
        self._decisions.append((now, decision, emitted))
        del self._decisions[:-_EVENTS]

    def begun(self, delta: Delta, now: float) -> None:
        """Record times and cached tokens of the delta that has the request's first token; later
        deltas change nothing."""
        if self.first:
            return
        self.first = now
        self.engine_us = delta.queued_us
        self.adapter_us = delta.adapter_us
        self.cached = max(0, delta.cached)
        sent = self._decisions[-1][0] if self._decisions else now
        self.started = sent + max(0, delta.queued_us) / 1e6

    def drafted(self, accepted: int) -> None:
        """Record that a step accepted draft tokens. accepted: number of these tokens, at least
        1."""
        self.accepted_runs[accepted] = self.accepted_runs.get(accepted, 0) + 1

    def moves(self, place: str, why: str, now: float) -> None:
        """Record that a choice has left its replica, and set the state "waiting".

        place: name of the replica that the choice has left. why: the reason, for users.
        """
        self.state = "waiting"
        self._moves.append((now, place, why))
        del self._moves[:-_EVENTS]

    def ends(self, output_tokens: int, error: str, now: float) -> None:
        self.output_tokens = output_tokens
        self.error = error
        self.ended = now
        self.state = "failed" if error else "finished"

    # -- for operators

    @property
    def decisions(self) -> Sequence[tuple[float, RoutingDecision, int]]:
        """The last routing decisions as (time in seconds, decision, tokens emitted before)."""
        return self._decisions

    @property
    def moves_made(self) -> Sequence[tuple[float, str, str]]:
        """The last moves as (time in seconds, name of the replica that was left, reason)."""
        return self._moves

    @property
    def moved(self) -> bool:
        return bool(self._moves)

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that the request was sent to, in order."""
        return [decision.replica for _, decision, _ in self._decisions]

    def visits(self) -> list[tuple[float, float, RoutingDecision, int, str]]:
        """Return the stays of an ended request at replicas, in order.

        Each is (start, end, decision, tokens emitted before, why the choice left the replica or
        ""). Choices of one request can be at different replicas at the same time.
        """
        moves = list(self._moves)
        visits = []
        for at, decision, emitted in self._decisions:
            departure = next((m for m in moves if m[0] >= at and m[1] == decision.replica), None)
            if departure is not None:
                moves.remove(departure)
            until, why = (self.ended, "") if departure is None else (departure[0], departure[2])
            visits.append((at, until, decision, emitted, why))
        return visits

    def to_json(self, router: str, now: float) -> dict[str, Any]:
        """Return the trace as JSON. Durations are milliseconds, or None for a stage not reached.

        router: name of this router.
        now: monotonic seconds, at which durations of an unfinished request end.
        """
        end = self.ended or now
        waited = (self.placed or end) - self.arrived
        decode = end - self.first if self.first else None
        return {
            "state": self.state,
            "router": router,
            "model": self.model,
            "received_at": round(self.received_at, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached,
            "output_tokens": self.output_tokens,
            "accepted_runs": [
                {"tokens": tokens, "steps": steps}
                for tokens, steps in sorted(self.accepted_runs.items())
            ],
            "choices": self.choices,
            "max_tokens": self.max_tokens,
            "finish_reasons": list(self.finish),
            "error": self.error or None,
            "timing_ms": {
                "queue": _ms(waited),
                "engine_queue": _ms(self.engine_us / 1e6) if self.engine_us >= 0 else None,
                "prefill": _ms(self.first - self.started) if self.first else None,
                "first_token": _ms(self.first - self.arrived) if self.first else None,
                "decode": _ms(decode),
                "total": _ms(end - self.arrived),
            },
            "adapter": self._adapter(),
            "route": [
                {
                    "at_ms": _ms(at - self.arrived),
                    "replica": decision.replica,
                    "reason": decision.reason,
                    "why": _WHY[decision.reason],
                    "expected_ms": _ms(decision.seconds),
                    "expected_cached_tokens": decision.cached,
                    "emitted_tokens": emitted,
                }
                for at, decision, emitted in self._decisions
            ],
            "moves": [
                {"at_ms": _ms(at - self.arrived), "from": place, "why": why}
                for at, place, why in self._moves
            ],
        }

    def _adapter(self) -> dict[str, Any] | None:
        """Return the request's adapter as JSON; None without one.

        load_ms is the time for which the request waited until the adapter was on the device.
        """
        if not self.adapter:
            return None
        name, _, revision = self.adapter.partition("@")
        return {
            "name": name,
            "revision": revision or None,
            "loaded": self.adapter_us > 0,
            "load_ms": _ms(self.adapter_us / 1e6) if self.adapter_us >= 0 else None,
        }


class RequestTraces:
    """The traces of the last ended requests; `kept` is their maximum number."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ended: deque[RequestTrace] = deque(maxlen=kept)

    def add(self, trace: RequestTrace) -> None:
        self._ended.append(trace)

    def last(self, count: int) -> Iterator[RequestTrace]:
        """Return the traces of the requests that ended last, the newest first."""
        return islice(reversed(self._ended), count)

    def find(
        self, id: str, owner: str | None, unfinished: Iterable[RequestTrace] = ()
    ) -> Iterator[RequestTrace]:
        """Return all traces with a request id, in the order of arrival.

        The traces belong to the prompts of one call, or to several calls with the same id. The
        search scans all traces, so that requests need not maintain an index.

        owner: digest of the API key that asks, which sees its own traces only; None: all.
        unfinished: traces of requests in flight, which are searched too.
        """
        traces_found = [
            trace
            for traces in (self._ended, unfinished)
            for trace in traces
            if trace.id == id and (owner is None or trace.owner == owner)
        ]
        traces_found.sort(key=lambda trace: trace.arrived)
        return iter(traces_found)


def log_trace(trace: RequestTrace) -> None:
    """Log a line for a request that has ended: at level info if it failed or moved, at level debug
    otherwise."""
    notable = trace.error or trace.moved
    level = logging.INFO if notable else logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    first = trace.first - trace.arrived if trace.first else 0.0
    fields = {
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached,
        "output_tokens": trace.output_tokens,
        "finish": trace.error or ",".join(trace.finish),
        "first_token_ms": _ms(first),
        "total_ms": _ms(trace.ended - trace.arrived),
        "replicas": ",".join(trace.replicas),
    }
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.log(level, "%s: %s", trace.state, text, extra={"request_id": trace.id, **fields})


def context_of(traceparent: str, tracestate: str, settings: TracingSettings) -> TraceContext | None:
    """Return the caller's trace context, or a new one without it; None if the context is not
    sampled.

    If the caller's context has a sampling decision, it applies.

    traceparent, tracestate: the request's headers; "": none.
    """
    context = read_context(traceparent, tracestate) or new_context(settings.sample)
    return context if context.sampled else None


def spans_of(trace: RequestTrace, context: TraceContext, router: str) -> list[Span]:
    """Return the spans of an ended request, the root span first.

    Names and attributes with gen_ai are OpenTelemetry's conventions for generative models.
    """
    shift = trace.received_at - trace.arrived  # offset from monotonic to Unix seconds
    end = trace.ended + shift
    root = Span(
        "manta.request",
        context,
        trace.received_at,
        end,
        kind=SERVER,
        attributes={
            "gen_ai.request.model": trace.model,
            "gen_ai.request.choice.count": trace.choices,
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
            "gen_ai.usage.output_tokens": trace.output_tokens,
            "gen_ai.response.finish_reasons": list(trace.finish),
            "manta.request_id": trace.id,
            "manta.router": router,
            "manta.cached_tokens": trace.cached,
        },
        error=trace.error,
    )
    if trace.max_tokens is not None:
        root.attributes["gen_ai.request.max_tokens"] = trace.max_tokens
    if trace.first:
        root.attributes["gen_ai.server.time_to_first_token"] = trace.first - trace.arrived
    placed = trace.placed + shift if trace.placed else end
    spans = [root, root.child("router.queue", trace.received_at, placed)]
    visits = trace.visits()
    began = max((i for i, (at, *_) in enumerate(visits) if at <= trace.first), default=-1)
    for i, (at, until, decision, emitted, why) in enumerate(visits):
        visit = root.child("replica", at + shift, until + shift)
        visit.attributes = {
            "manta.replica": decision.replica,
            "manta.route.reason": decision.reason,
            "manta.route.expected_seconds": decision.seconds,
            "manta.route.expected_cached_tokens": decision.cached,
            "manta.emitted_tokens": emitted,
        }
        visit.error = why
        spans.append(visit)
        if trace.first and i == began:
            started = min(max(trace.started, at), trace.first) + shift
            first = trace.first + shift
            spans.append(visit.child("engine.queue", at + shift, started))
            spans.append(
                visit.child(
                    "engine.prefill",
                    started,
                    first,
                    manta__tokens=trace.prompt_tokens - trace.cached,
                )
            )
            spans.append(visit.child("engine.decode", first, max(until + shift, first)))
    return spans


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
