"""The live view: what a router knows of its models at present, as JSON for GET /v1/live.

The view is computed on demand from the state of routing, queue and traces, in bounded time however
many requests are in flight. Nothing is recorded for the view, so requests do not pay for it.
"""

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec

from deployments.observe.application_metrics import SingleFlight
from deployments.router.admission.request_queue import RequestQueue
from deployments.router.inflight import InflightRequest
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.router.replicas.replicas import Replicas
from deployments.router.request_trace import RequestTrace
from deployments.router.requests_in_flight import RequestsInFlight
from deployments.routing.fleet import DECODE, FIXED, TOKEN, Fleet
from deployments.routing.step_cost import StepCostModel


class ApplicationView:
    """The collector of the live views of all routers of an application.

    Concurrent callers share one call to the other routers.

    own: returns this router's view.
    others: returns the views of those other routers that answer in time.
    """

    def __init__(
        self,
        own: Callable[[], dict[str, Any]],
        others: Callable[[], Awaitable[list[dict[str, Any]]]],
    ) -> None:
        self._own = own
        self._others = others
        self.routers = SingleFlight(self._gather)

    async def _gather(self) -> list[dict[str, Any]]:
        """Return the views of all routers, sorted by name."""
        views = {view["router"]: view for view in await self._others()}
        own = self._own()
        return sorted([*(views | {own["router"]: own}).values()], key=lambda view: view["router"])


_REQUESTS = 256  # maximum of requests in flight that are listed, the oldest first
# Number of newest requests in flight, and of requests that ended last, whose routing decisions and
# moves are listed.
_NEWEST = 64
_CHOICES = 50
_EVENTS = 50
_QUEUES = 32


class EventLog:
    """A log of the replicas that joined or were lost most recently."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, str, str, str]] = deque(maxlen=_EVENTS)

    def add_entry(self, kind: str, replica: str, why: str = "") -> None:
        """Add an entry. kind: "joined" or "lost". why: reason of a loss."""
        self._last.append((time.monotonic(), kind, replica, why))

    def entries(self) -> Iterator[tuple[float, dict[str, Any]]]:
        for at, kind, replica, why in self._last:
            yield at, {"kind": kind, "replica": replica, "request": None, "why": why}


def view_of_model(
    replicas: Replicas,
    queue: RequestQueue,
    requests: RequestsInFlight,
    events: EventLog,
) -> dict[str, Any]:
    """Return the live view of one model.

    Times are given as seconds ago, because routers' clocks differ, and durations in milliseconds.
    Unknown values, and times of stages that a request has not reached, are None.
    """
    now = time.monotonic()
    fleet = replicas.fleet
    fleet.refresh()
    newest = [inflight.trace for inflight in islice(reversed(requests), _NEWEST)]
    known = list(chain(newest, requests.traces.last(_NEWEST)))
    moved = chain(events.entries(), *(_moves(trace) for trace in known))
    return {
        "in_flight": len(requests),
        "queued": queue.choices,
        "queued_tokens": queue.tokens,
        "queues": [
            {"key": key, "requests": waiting, "tokens": int(tokens)}
            for key, waiting, tokens in queue.longest(_QUEUES)
        ],
        "replicas": [_replica(client, fleet, now) for client in replicas.values()],
        "requests": [_request(inflight, now) for inflight in islice(requests, _REQUESTS)],
        "choices": _last(chain.from_iterable(map(_choices, known)), _CHOICES, now),
        "events": _last(moved, _EVENTS, now),
    }


def _last(
    entries: Iterable[tuple[float, dict[str, Any]]], count: int, now: float
) -> list[dict[str, Any]]:
    """Return the newest `count` entries, the newest first, each with its age in seconds (`ago_s`).

    entries: pairs (time, entry). now: the present time of the same clock.
    """
    newest = sorted(entries, key=lambda pair: pair[0], reverse=True)[:count]
    return [{"ago_s": round(now - at, 3), **entry} for at, entry in newest]


def _replica(client: ReplicaClient, fleet: Fleet, now: float) -> dict[str, Any]:
    """Return a replica's state as JSON; `cost` has the expected seconds per request and token
    (routing/fleet.py)."""
    state, column = client.state, client.state.column
    fixed = fleet.terms[FIXED, column] if column >= 0 else math.inf
    return {
        "name": client.replica,
        "pool": state.pool,
        "connected": client.connection is not None,
        "available": state.available,
        "seen_ago_s": round(now - state.seen, 3) if state.seen else None,
        "stats": msgspec.structs.asdict(state.stats),
        "ours": state.held,
        "room": state.room()[0] if state.available else 0,
        "tokens_per_second": _finite(state.rate()),
        "steps": _steps(state.steps),
        "cost": {
            "wait_ms": _ms(fixed),
            "prompt_token_ms": _ms(fleet.terms[TOKEN, column] if column >= 0 else math.inf),
            "output_token_ms": _ms(fleet.terms[DECODE, column] if column >= 0 else math.inf),
        },
    }


def _steps(steps: StepCostModel) -> dict[str, float] | None:
    """Return the measured cost of a replica's steps as JSON; None until measured."""
    if not steps.measured:
        return None
    cost = steps.cost
    return {
        "base_ms": round(1000 * cost.base, 6),
        "sequence_ms": round(1000 * cost.sequence, 6),
        "token_ms": round(1000 * cost.token, 6),
    }


def _request(inflight: InflightRequest, now: float) -> dict[str, Any]:
    """Return a prompt in flight as JSON.

    `replicas` are the replicas that run its choices. Output tokens are those of all choices.
    """
    trace, choices = inflight.trace, inflight.choices
    return {
        "id": trace.id,
        "model": trace.model,
        "key": inflight.request.key,
        "state": trace.state,
        "replicas": sorted({choice.place for choice in choices if not choice.done} - {""}),
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached,
        "output_tokens": inflight.output_tokens,
        "max_tokens": trace.max_tokens,
        "age_s": round(now - trace.arrived, 3),
        "first_token_ms": _ms(trace.first - trace.arrived) if trace.first else None,
    }


def _choices(trace: RequestTrace) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (time, JSON) of each routing decision of a request.

    first_token_ms is the measured counterpart of expected_ms; it is None if the chosen replica did
    not generate the first token.
    """
    for at, decision, emitted in trace.decisions:
        first = trace.first - at if trace.first > at and not emitted else None
        yield (
            at,
            {
                "request": trace.id,
                "replica": decision.replica,
                "reason": decision.reason,
                "prompt_tokens": trace.prompt_tokens,
                "expected_cached_tokens": decision.cached,
                "expected_ms": _ms(decision.seconds),
                "first_token_ms": _ms(first),
                "emitted_tokens": emitted,
            },
        )


def _moves(trace: RequestTrace) -> Iterator[tuple[float, dict[str, Any]]]:
    for at, replica, why in trace.moves_made:
        yield at, {"kind": "moved", "replica": replica, "request": trace.id, "why": why}


def _finite(value: float) -> float | None:
    return round(float(value), 3) if math.isfinite(value) else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _finite(1000 * seconds)
